"""The graph of stages: keys, plan, run, resume, lineage."""
