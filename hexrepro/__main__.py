"""`python -m hexrepro`: see hexrepro/cli.py."""

import sys

from hexrepro.cli import main

if __name__ == "__main__":
    sys.exit(main())
