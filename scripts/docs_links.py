"""A hook of MkDocs: links of the pages to files beside docs/, which the site does not have, become their names."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Replace links that leave docs/ by their text; MkDocs calls it for each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(found: re.Match[str]) -> str:
        leaves = posixpath.normpath(posixpath.join(folder, found[2])).startswith("..")
        return found[1] if leaves else found[0]

    return _LINK.sub(replace, markdown)
