"""Files of `deploy/`: their YAML, and the command lines in them, which the program itself parses."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millstream.cli.main import load_command
from tests.support.pages import ROOT
from tests.support.requirements import skip_without

DEPLOY = ROOT / "deploy"


def documents(text: str) -> list[Any]:
    """The documents of a text of YAML."""
    skip_without(find_spec("yaml"), "PyYAML is not installed: make setup")
    return [one for one in import_module("yaml").safe_load_all(text) if one is not None]


def read_yaml(path: Path) -> Any:
    """The one document of a file."""
    (found,) = documents(path.read_text())
    return found


def parsed_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of a command line, its first word a command of millstream. Raises click's UsageError."""
    name, *options = words
    with load_command(name).make_context(name, list(options)) as context:
        found: dict[str, Any] = context.params
        return found


def served_port(words: Sequence[str]) -> int:
    """The port on which a command line serves other machines: the pages of a console, or metrics."""
    if words[0] != "console":
        return metrics_port(words)
    options = parsed_options(words)
    assert options["host"] == "0.0.0.0", "no other machine reaches it"
    assert options["token_file"] is not None, "without a token it does not leave its machine"
    port: int = options["port"]
    return port


def metrics_port(words: Sequence[str]) -> int:
    """The port on which a command line serves metrics to other machines."""
    host, _, port = parsed_options(words)["metrics_address"].rpartition(":")
    assert host == "0.0.0.0", "no other machine reaches it"
    return int(port)
