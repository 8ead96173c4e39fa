"""The catalogue of key names: scripts, rights and pages name no other keys, and the pages name them all."""

import ast
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest

from millstream.admin.acl import ROLES
from millstream.redis_client import key_names
from millstream.redis_client.key_names import (
    GroupBatchKeys,
    HandlerKeys,
    Key,
    ServiceKeys,
    SinkKeys,
    StreamKeys,
    hash_tag,
    live_workers_key,
    worker_drain_key,
    worker_name_key,
)
from tests.support.prose import words_of_code, words_of_script

pytestmark = [pytest.mark.groups]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/millstream"
SCRIPTS = PACKAGE / "redis_client/lua"
CATALOGUE = PACKAGE / "redis_client/key_names.py"
SERVICE_SCRIPTS = ("leases", "service_state")
SECTIONS: dict[type, str] = {
    HandlerKeys: "A handler on a stream",
    StreamKeys: "A stream `S` itself",
    SinkKeys: "A sink",
    ServiceKeys: "A service",
}


def suffixes(owner: type) -> set[str]:
    """The suffixes of all keys of a class of the catalogue, those with a parameter in them as well."""
    plain = {key.suffix for key in vars(owner).values() if isinstance(key, Key)}
    with_parameter = re.findall(r"base\}:(?:\{\w+\}:)?([a-z-]+)|name \+ b\":([a-z-]+)", source_of(owner))
    return plain | {one or other for one, other in with_parameter}


def source_of(owner: type) -> str:
    text = CATALOGUE.read_text()
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    return ast.get_source_segment(text, found) or ""


def suffixes_in_script(text: str) -> set[str]:
    """The suffixes that a script appends to a key of its caller."""
    found = re.findall(r"BASE \.\. '([a-z-]+):?'|':([a-z-]+)'", re.sub(r"--.*", "", text))
    return {one or other for one, other in found}


def section(title: str) -> str:
    """The part of the page about one kind of key, up to the next."""
    page = (ROOT / "docs/architecture.md").read_text()
    return page.partition(f"**{title}")[2].partition("\n**")[0]


def test_a_key_is_a_description_and_the_name_of_an_object() -> None:
    assert HandlerKeys.parked.kind == "hash"
    assert HandlerKeys("shop", "pay", "orders").parked == "millstream:{orders}:orders:shop.pay:parked"
    assert ServiceKeys("s").streams_of("c") == "millstream:{s-input}:s-input:of:c"
    assert live_workers_key("shop", "pay") == "millstream:worker:shop:alive:pay"


def test_the_drain_of_a_worker_is_in_the_hash_slot_of_its_name() -> None:
    assert hash_tag(worker_drain_key("shop", "w-0")) == worker_name_key("shop", "w-0")


@pytest.mark.parametrize("owner", [HandlerKeys, StreamKeys, GroupBatchKeys, SinkKeys, ServiceKeys])
def test_each_key_is_described_once_with_its_type(owner: type) -> None:
    keys = [key for key in vars(owner).values() if isinstance(key, Key)]
    assert keys
    assert {key.kind for key in keys} <= {"string", "hash", "list", "set", "sorted set", "stream"}
    assert len({key.suffix for key in keys}) == len(keys)


def test_scripts_derive_only_keys_of_the_catalogue() -> None:
    seen: dict[type, set[str]] = {HandlerKeys: set(), ServiceKeys: set()}
    for path in SCRIPTS.rglob("*.lua"):
        owner = ServiceKeys if {path.stem, path.parent.name} & {*SERVICE_SCRIPTS} else HandlerKeys
        seen[owner] |= suffixes_in_script(path.read_text())
    assert len(seen[HandlerKeys]) >= 12, "the expression finds the suffixes no more"
    assert len(seen[ServiceKeys]) >= 12, "the expression finds the suffixes no more"
    known: dict[type, set[str]] = {
        HandlerKeys: suffixes(HandlerKeys) | suffixes(StreamKeys),
        ServiceKeys: suffixes(ServiceKeys),
    }
    assert {owner.__name__: found - known[owner] for owner, found in seen.items() if found - known[owner]} == {}


def test_a_suffix_of_a_script_that_the_catalogue_lacks_is_found() -> None:
    script = "local READY, OTHER = BASE .. 'ready', BASE .. 'other:' -- BASE .. 'gone'\nreturn name .. ':tail'"
    assert suffixes_in_script(script) - suffixes(HandlerKeys) == {"other", "tail"}


def literal_suffixes(package: Path) -> Iterator[str]:
    """Each key that a module outside of the catalogue puts together itself."""
    for path in sorted(package.rglob("*.py")):
        if path.name != CATALOGUE.name:
            yield from (f"{path.name}: {one}" for one in re.findall(r"f\"\{[\w.]*base\}:[a-z]+", path.read_text()))


def test_no_other_module_puts_a_key_together() -> None:
    assert list(literal_suffixes(PACKAGE)) == []


def test_a_key_that_a_module_puts_together_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('key = f"{keys.base}:consumers"')
    assert list(literal_suffixes(tmp_path)) == ['x.py: f"{keys.base}:consumers']


def test_rights_and_patterns_name_only_keys_of_the_catalogue() -> None:
    granted = {one.partition(":")[0] for role in ROLES.values() for one in role.stream_keys}
    assert {one for one in granted if one.isalpha()} <= suffixes(StreamKeys) | {"batch"}
    scanned = {one for path in PACKAGE.rglob("*.py") for one in re.findall(r"PREFIX\}:\*:(\w+)", path.read_text())}
    assert scanned
    assert scanned <= suffixes(HandlerKeys)


@pytest.mark.parametrize("owner", SECTIONS)
def test_architecture_names_all_keys_and_no_others(owner: type) -> None:
    text = section(SECTIONS[owner])
    named = set(re.findall(r"`:(?:<[^`]*>:)?([a-z-]+)", text)) - {"batch"}
    assert named == suffixes(owner)


@pytest.mark.xdist_group("syntax")  # what is parsed is parsed once
def test_architecture_names_only_fields_that_exist() -> None:
    known = {word for path in PACKAGE.rglob("*.py") for word in words_of_code(path.read_text())}
    known |= {word for path in SCRIPTS.rglob("*.lua") for word in words_of_script(path.read_text())}
    for owner, title in SECTIONS.items():
        fields = set(re.findall(r"`([a-z_]+)`", section(title)))
        assert fields - known == set(), owner.__name__


def test_names_of_processes_are_in_architecture() -> None:
    text = section("Names of processes")
    functions = [name for name in vars(key_names) if name.endswith("_key")]
    assert len(functions) >= 6
    for name in functions:
        expected = signature(getattr(key_names, name)).parameters
        parameters = ("<app>", "<handler>" if "handler" in expected else "<x>", "<x>")[: len(expected)]
        assert re.sub(r"<\w+>$", "", getattr(key_names, name)(*parameters)) in text, name
