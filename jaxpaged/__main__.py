"""`python -m jaxpaged`, and the command `jaxpaged`."""

import sys


def main() -> int:
    """Runs the command line and returns the exit status (see `cli`). Ctrl-C ends it quietly while it is still being imported, too."""
    try:
        from jaxpaged.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
