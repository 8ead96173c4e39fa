"""How often a Redis server has run each command, by its own count: INFO COMMANDSTATS."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from millstream.redis_client.client import Client


def commands_run(ask: Callable[..., Any]) -> Counter[str]:
    """The number of runs of each command, or of each `command|subcommand`, those in scripts included.

    `ask` sends a command and returns the reply: `Client.execute`, or `EmbeddedServer.call`.
    """
    found: Counter[str] = Counter()
    for line in ask("INFO", "commandstats").decode().splitlines():
        name, _, figures = line.partition(":calls=")
        if figures:
            found[name.removeprefix("cmdstat_")] = int(figures.partition(",")[0])
    return found


def scripts_run(client: Client) -> int:
    """How many scripts the server was asked to run: by their hash, and by their text where it lacked them."""
    found = commands_run(client.execute)
    return found["evalsha"] + found["eval"]
