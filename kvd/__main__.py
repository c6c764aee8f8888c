"""python -m kvd is the kvd command."""

from kvd.cli.main import main

main()
