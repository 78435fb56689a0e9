"""What measured processes share: `common.py`; a script for each peer and command beside it."""
