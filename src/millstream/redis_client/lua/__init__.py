"""Server-side steps: one Lua script a file, each beginning with its keys, arguments, reply and invariants."""

import re

_INCLUDE = re.compile(r"^-- include (\w+)$", re.MULTILINE)


def text_of(name: str) -> str:
    """The text of a script, with that of the files that its lines `-- include NAME` stand for."""
    return _INCLUDE.sub(lambda found: text_of(f"include/{found[1]}"), _file(name))


def _file(name: str) -> str:
    from importlib import resources  # costly, and needed with the first script only

    return (resources.files(__name__) / f"{name}.lua").read_text("utf-8")
