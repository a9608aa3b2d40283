"""`python -m graph`: the command, without the console script."""

from graph.cli import main

main()
