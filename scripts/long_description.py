"""A hook of the build: the README as the long description of the package.

On a package index a relative link leads nowhere. Here it becomes its text and the path of the file in the sources.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#]+)(?:#[^)]*)?\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme` when a wheel or an archive of the sources is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into the metadata, without its relative links."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _LINK.sub(r"\1 (`\2`)", text)}
