"""Packages whose names are imported when they are first asked for, so that a light module comes without the heavy ones.

To import any module of a package is to run the package itself before. What is imported there for the convenience of
others every process pays for, Spark's Python workers first of all, which start often.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def names_of(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """The `__getattr__` of `package` (PEP 562), for the names that each of the modules `homes` has."""

    def find(name: str) -> object:
        for home, names in homes.items():
            if name in names:
                found = getattr(import_module(home), name)
                setattr(sys.modules[package], name, found)
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
