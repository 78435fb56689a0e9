"""Raw sources to clean, identified documents: read, clean, mask personal data, judge, deduplicate, hold out."""
