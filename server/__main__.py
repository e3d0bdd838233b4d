"""`python -m server` is `jaxpaged serve`."""

import sys

from jaxpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
