"""`python -m saccade`."""

from saccade.cli.app import main

main()
