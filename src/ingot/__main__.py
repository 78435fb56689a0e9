"""`python -m ingot`, the same as `ingot`."""

from ingot.cli import main

if __name__ == "__main__":
    main()
