"""Lua scripts, called by their hash."""

import functools
import hashlib
from collections.abc import Sequence

from millstream.redis_client.error_translation import known_scripts
from millstream.redis_client.lua import text_of
from millstream.redis_client.resp import Arg, Command


class Script:
    """A Lua script in a file of `millstream.redis_client.lua`; called by its hash, and loaded if a server lacks it.

    Content-addressed, so old and new versions run side by side during an upgrade (Redis EVALSHA). A line
    `-- include NAME` is replaced by the text of that file. `allow_oom`: it may run at maxmemory (Redis script flags).
    """

    def __init__(self, name: str, *, allow_oom: bool = False) -> None:
        self.name = name
        self._allow_oom = allow_oom

    @functools.cached_property
    def text(self) -> str:
        """Its full text, read at first use, as no process needs every script."""
        text = text_of(self.name)
        return text.replace("#!lua", "#!lua flags=allow-oom", 1) if self._allow_oom else text

    @functools.cached_property
    def sha(self) -> str:
        """Its SHA-1 hash, by which Redis identifies it."""
        sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        known_scripts[sha] = known_scripts[self.text] = self
        return sha

    def command(self, keys: Sequence[Arg], args: Sequence[Arg]) -> Command:
        """The command that runs the script by its hash; a server that lacks it replies ScriptMissing."""
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


def with_texts(commands: Sequence[Command], *, on_one_server: bool = True) -> list[Command]:
    """Commands that do on servers without the scripts what these of `Script.command` do: they send the texts.

    `on_one_server`: then the first command of a script loads it for the rest
    """
    loaded: set[Arg] = set()
    found: list[Command] = []
    for command in commands:
        if command[1] in loaded:
            found.append(command)
            continue
        found.append(("EVAL", known_scripts[command[1]].text, *command[2:]))
        if on_one_server:
            loaded.add(command[1])
    return found
