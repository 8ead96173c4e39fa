"""`python -m millstream`: the command `millstream`, for where no folder of PATH has it."""

from millstream.cli.main import main

if __name__ == "__main__":
    main()
