"""Lazy imports: a package imports the modules behind its names on first use, so light modules do not load heavy ones.

Importing any module of a package first runs the package's `__init__`. Every process pays for the imports there, above
all Spark's Python workers, which start often.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def names_of(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package` (PEP 562). `modules` maps each module to the names it exports.

    Modules of the package itself are found under their own names too, as if the package had imported them.
    """

    def find(name: str) -> object:
        if (own := f"{package}.{name}") in modules:
            return import_module(own)
        for module, names in modules.items():
            if name in names:
                found = getattr(import_module(module), name)
                setattr(sys.modules[package], name, found)
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_all() -> list[str]:
        return sorted({*vars(sys.modules[package]), *(name for names in modules.values() for name in names)})

    return find, list_all
