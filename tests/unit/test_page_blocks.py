"""Blocks of pages that are no Python: YAML parses, units, Dockerfiles and nginx's files have the lines that they need."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy_files import documents, parsed_options
from tests.support.pages import ROOT, blocks_of
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
UNITS = {name: ROOT / f"deploy/systemd/millstream-{name}.service" for name in ("worker", "console")}
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The blocks of a language: their page and text."""
    for page in PAGES:
        yield from ((page, block.text) for block in blocks_of(page) if block.language == language)


def unit(text: str) -> configparser.RawConfigParser:
    """A unit of systemd."""
    parser = configparser.RawConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names are told apart by case
    parser.read_string(text)
    return parser


def test_every_block_of_yaml_parses() -> None:
    found = [(page, document) for page, text in blocks("yaml") for document in documents(text)]
    assert len(found) >= 5
    assert [page for page, document in found if not isinstance(document, dict)] == []
    for page, document in found:
        if "apiVersion" in document:
            assert {"kind", "metadata", "spec"} <= document.keys(), page


def test_no_pod_of_a_page_replaces_the_entry_point_of_its_image() -> None:
    found = [
        document for _, text in blocks("yaml") for document in documents(text) if document.get("kind") == "Deployment"
    ]
    containers = [one for document in found for one in document["spec"]["template"]["spec"]["containers"]]
    assert len(containers) >= 4
    assert [one["name"] for one in containers if "command" in one] == [], "without tini its orphans stay zombies"


def test_every_unit_of_a_page_is_the_file_of_the_clone() -> None:
    shown = [text for page, text in blocks("ini") if page == "docs/operations/systemd.md"]
    assert shown == [path.read_text() for path in UNITS.values()]
    assert {*UNITS.values()} == {*(ROOT / "deploy/systemd").iterdir()}


def test_the_unit_starts_a_command_that_millstream_understands_and_stops_it_in_order() -> None:
    service = unit(UNITS["worker"].read_text())["Service"]
    _, *words = shlex.split(service["ExecStart"])
    assert int(service["TimeoutStopSec"]) > parsed_options(words)["stop_timeout"]
    assert (service["KillSignal"], service["KillMode"], service["Restart"]) == ("SIGTERM", "mixed", "always")


def test_the_unit_of_the_console_serves_this_machine_with_tokens_of_a_file_and_writes_nothing() -> None:
    service = unit(UNITS["console"].read_text())["Service"]
    _, *words = shlex.split(service["ExecStart"])
    options = parsed_options(words)
    assert (words[0], options["host"], str(options["token_file"])) == (
        "console",
        "127.0.0.1",
        "/etc/shop/console-tokens",
    )
    assert (service["KillSignal"], service["Restart"], service["ProtectSystem"]) == ("SIGTERM", "always", "strict")
    assert service["User"] != unit(UNITS["worker"].read_text())["Service"]["User"], "it could read the tokens"


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    skip_without(shutil.which("systemd-analyze"), "systemd-analyze is not installed; it comes with systemd")
    text = UNITS[name].read_text()
    program = shlex.split(unit(text)["Service"]["ExecStart"])[0]
    copy = tmp_path / f"shop-{name}.service"
    copy.write_text(text.replace(program, sys.executable))  # systemd looks for the program
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if copy.name in line] == []  # the machine's own may be wrong


def test_every_block_of_nginx_has_complete_lines_and_sections() -> None:
    found = list(blocks("nginx"))
    assert found
    for page, text in found:
        depth = 0
        for line in (re.sub(r"\s*#.*", "", line).strip() for line in text.splitlines()):
            assert not line or line.endswith((";", "{")) or line == "}", f"{page}: {line}"
            depth += line.endswith("{") - (line == "}")
            assert depth >= 0, f"{page}: {line}"
        assert depth == 0, page
        zones = set(re.findall(r"limit_conn (\w+)", text))
        assert zones <= set(re.findall(r"zone=(\w+):", text)), page


def test_every_dockerfile_of_a_page_has_instructions_only() -> None:
    found = list(blocks("dockerfile"))
    assert len(found) >= 3
    for page, text in found:
        lines = [line for line in re.sub(r"\\\n", "", text).splitlines() if line and not line.startswith("#")]
        assert lines[0].startswith(("FROM ", "ARG ")), page
        assert {line.split()[0] for line in lines} <= INSTRUCTIONS, page
