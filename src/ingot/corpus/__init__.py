"""Turns raw sources into documents: read, clean, mask personal data, filter, deduplicate, split off a holdout."""
