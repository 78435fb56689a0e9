"""Scripts of the measured processes: one for each peer and command, and `common.py` for all of them."""
