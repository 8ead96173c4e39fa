"""The rights as data: that they say what the scripts do, and which keys they cover."""

import fnmatch
import re
from importlib import resources
from typing import Any

import pytest

from millstream.admin.acl import ROLES, SCRIPTS, RoleName, acl_rule
from millstream.errors import ConfigError
from millstream.redis_client.key_names import HandlerKeys, ServiceKeys, StreamKeys
from millstream.redis_client.scripts import Script

pytestmark = [pytest.mark.cli]

CALL = re.compile(
    r"(?:(?:redis\.p?call|redis\.acl_check_cmd|\bcall|\btry|\bmay)\(|\bpcall\(redis\.acl_check_cmd,)\s*'([A-Z]+)'(?:,\s*'([A-Z]+)')?"
)
CONTAINERS = ("XGROUP", "XINFO")

BAD_SERVICE = {"roles": [RoleName.LEASES], "services": ["a*"]}


def commands_in(lua: str) -> set[str]:
    found = CALL.findall(lua)
    return {f"{name}|{sub}".lower() if name in CONTAINERS else name.lower() for name, sub in found}


def test_the_commands_listed_for_a_script_are_those_that_the_script_runs() -> None:
    folders = [path for path in resources.files("millstream.redis_client.lua").iterdir() if path.is_dir()]
    files = {f"{folder.name}/{path.name}" for folder in folders for path in folder.iterdir()}
    scripts = {name.removesuffix(".lua") for name in files if name.endswith(".lua") and not name.startswith("include/")}
    assert {name: commands_in(Script(name).text) for name in scripts} == {
        name: set(commands.split()) for name, commands in SCRIPTS.items()
    }


@pytest.mark.parametrize("role", RoleName)
def test_no_role_lists_a_command_twice(role: RoleName) -> None:
    listed = ROLES[role].direct.split()
    assert len(listed) == len(set(listed))
    assert set(ROLES[role].never_executed.split()).isdisjoint(listed)


def covers(found: tuple[str, ...], key: str) -> bool:
    """Whether a glob pattern of an ACL rule covers a key. Braces mean nothing in both."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in found)


@pytest.mark.parametrize(("given", "stream"), [("orders", "orders"), ("orders*", "orders:{7}"), ("a{b}c", "a{b}c")])
def test_a_worker_may_access_only_its_streams_and_the_keys_of_its_app(given: str, stream: str) -> None:
    found = acl_rule("u", [RoleName.WORKER], streams=[given], outputs=["out"], app="shop").keys
    own, other = HandlerKeys("shop", "bill", stream), HandlerKeys("bank", "bill", stream)
    delayed = StreamKeys(stream)
    for key in (
        stream,
        "out",
        own.meta,
        own.state,
        own.dead_letters,
        own.incomplete,
        own.offsets,
        own.crashes,
        delayed.due,
    ):
        assert covers(found, key), key
    foreign = HandlerKeys("shop", "bill", "payments")
    for key in ("payments", other.state, foreign.state, delayed.producer("x"), "millstream:worker:bank:w-0"):
        assert not covers(found, key), key


def test_a_console_may_only_read_output_streams_unless_another_role_of_its_user_writes_them() -> None:
    of_console, of_both = (
        acl_rule("u", roles, streams=["orders"], outputs=["out", "orders"], app="shop")
        for roles in ([RoleName.CONSOLE], [RoleName.CONSOLE, RoleName.WORKER])
    )
    assert (of_console.read_keys, "out" in of_console.keys) == (("out",), False)
    assert of_console.line.endswith(" %R~out")
    assert (of_both.read_keys, "out" in of_both.keys, "%R~" in of_both.line) == ((), True, False)


def test_a_producer_may_not_access_the_keys_of_handlers() -> None:
    found = acl_rule("u", [RoleName.PRODUCER], streams=["orders"], outputs=["out"]).keys
    names = StreamKeys("orders")
    assert all(covers(found, key) for key in ("orders", names.due, names.producer("x"), names.dedupe(b"x")))
    assert not covers(found, HandlerKeys("shop", "bill", "orders").state)
    assert not covers(found, "out")


@pytest.mark.parametrize(
    ("given", "covered"),
    [
        ({"services": ["calls"]}, {"calls"}),
        ({"app": "shop"}, {"millstream:shop.bill"}),
        ({"services": ["calls"], "app": "shop"}, {"calls", "millstream:shop.bill"}),
        ({}, {"millstream:shop.bill", "millstream:bank.bill"}),
        ({"services": ["*"]}, {"calls", "callers", "millstream:shop.bill", "millstream:bank.bill"}),
    ],
)
def test_the_leases_role_covers_named_services_and_those_of_the_apps_handlers(
    given: dict[str, Any], covered: set[str]
) -> None:
    found = acl_rule("u", [RoleName.LEASES], **given).keys
    for service in ("calls", "callers", "millstream:shop.bill", "millstream:bank.bill"):
        names = ServiceKeys(service)
        for key in (names.input, names.meta, names.owners, f"{names.base}:of:w-0"):
            assert covers(found, key) == (service in covered), key
    assert covers(found, "orders") == ("*" in found)


def test_an_operator_may_access_the_services_that_the_rule_names() -> None:
    streams: dict[str, Any] = {"streams": ["orders"]}
    assert not covers(acl_rule("u", [RoleName.OPERATOR], **streams).keys, "millstream:shop.bill-input")
    assert covers(acl_rule("u", [RoleName.OPERATOR], app="shop", **streams).keys, "millstream:shop.bill-input")
    assert covers(acl_rule("u", [RoleName.OPERATOR], services=["calls"], **streams).keys, "calls-input")
    assert not covers(acl_rule("u", [RoleName.WORKER], services=["calls"], **streams).keys, "calls-input")


def test_only_roles_that_read_from_replicas_may_run_info_and_readonly() -> None:
    for role in RoleName:
        more = {"info", "readonly"} if role in (RoleName.SPARK, RoleName.SOURCE, RoleName.GROUP_SOURCE) else set()
        for cluster in (True, False):
            usual = set(acl_rule("u", [role], cluster=cluster).commands)
            found = set(acl_rule("u", [role], cluster=cluster, replicas=True).commands)
            assert found - usual == (more if cluster else more - {"readonly"}) - usual


def test_only_roles_that_keep_or_show_states_may_let_them_expire_and_only_when_asked() -> None:
    allowed = {"hpexpire", "hpexpireat", "hpexpiretime"}
    roles = {RoleName.WORKER: allowed, RoleName.SPARK: allowed, RoleName.OPERATOR: {"hpexpiretime"}}
    for role in RoleName:
        usual = set(acl_rule("u", [role]).commands)
        assert not usual & allowed, "Redis 7.0 would refuse the rule"
        assert set(acl_rule("u", [role], state_ttl=True).commands) - usual == roles.get(role, set())


def test_a_character_that_an_acl_rule_cannot_hold_becomes_a_wildcard() -> None:
    assert acl_rule("u", [RoleName.PRODUCER], streams=["a \"b'é\n"]).keys[0] == "a??b????"


def test_only_roles_that_search_for_streams_may_scan() -> None:
    for role in RoleName:
        named = acl_rule("u", [role], streams=["orders"]).commands
        assert ("scan" in named) == (role in (RoleName.OPERATOR, RoleName.EXPORTER, RoleName.CONSOLE))
        by_pattern = acl_rule("u", [role], streams=["orders*"]).commands
        assert ("scan" in by_pattern) == (
            role
            not in (
                RoleName.SINK,
                RoleName.PRODUCER,
                RoleName.LEASES,
                RoleName.MASTER,
                RoleName.CONSUMER,
                RoleName.ROUTER,
            )
        )


@pytest.mark.parametrize(
    "options", [{"user": "a b"}, {"app": "a.b"}, {"streams": [""]}, {"streams": ["a}b"]}, BAD_SERVICE]
)
def test_names_that_an_acl_rule_cannot_hold_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        acl_rule(**{"user": "u", "roles": [RoleName.WORKER], **options})  # type: ignore[arg-type]
