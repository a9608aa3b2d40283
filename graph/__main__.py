"""The console script, and `python -m graph`. Ctrl-C ends it quietly, also while the command is still being loaded."""

import sys


def main() -> None:
    """Runs the command; ends the process with its exit status."""
    try:
        from graph.cli import main as command  # not above: it takes most of the time until a command begins

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
