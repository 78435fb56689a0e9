"""`python -m ingot`, the same as `ingot`."""

from ingot.cli.app import main

if __name__ == "__main__":
    main()
