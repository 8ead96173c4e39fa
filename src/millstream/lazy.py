"""Packages whose names are imported when they are first asked for, so that a light module comes without the heavy ones.

To import any module of a package is to run the package itself before. What is imported there for the convenience of
others every process pays for, Spark's Python workers first of all, which start often.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def names_of(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `package` (PEP 562), for the names that each of the modules `homes` has.

    Those of the modules that are in the package are found by their own names, too, as if it had imported them.
    """

    def find(name: str) -> object:
        if (module := f"{package}.{name}") in homes:
            return import_module(module)
        for home, names in homes.items():
            if name in names:
                found = getattr(import_module(home), name)
                setattr(sys.modules[package], name, found)
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_all() -> list[str]:
        return sorted({*vars(sys.modules[package]), *(name for names in homes.values() for name in names)})

    return find, list_all
