"""`python -m sparkgpt`, the same as the command `sparkgpt`."""

import sys

from sparkgpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
