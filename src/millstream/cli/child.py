"""Starts a program that another one runs as its child: `python -m millstream.cli.child worker_child ARGUMENTS`.

The program is the function `main` of a module of this package. It is imported with the garbage collector off.
"""

import sys
from importlib import import_module

from millstream.cli.held_gc import hold_gc


def main() -> None:
    """Run the program that the first argument names with the other arguments; it calls `release_gc`."""
    hold_gc()
    import_module(f"{__package__}.{sys.argv.pop(1)}").main()


if __name__ == "__main__":
    main()
