"""`python -m turnkeeper`: the command line."""

from .actors.cli import main

if __name__ == "__main__":
    main()
