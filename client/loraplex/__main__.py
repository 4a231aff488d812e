"""`python -m loraplex`: the command line."""

from loraplex.cli import main

main()
