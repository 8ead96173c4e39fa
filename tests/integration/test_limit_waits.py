"""A key that waits for the limit of its handler: `millstream why`, `key list`, `key show` and the console name the limit."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream import Limit, Message, Retry
from millstream.admin.value_redaction import hide_fields
from millstream.delivery.running_code import code_of, report_code
from millstream.observability import metrics as m
from millstream.observability.metrics import Recorder
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import running_code_key
from millstream.spark.run.query_metrics import report_batch
from tests.support.command_stats import commands_run
from tests.support.commandline import call
from tests.support.consoles import console
from tests.support.task_fixtures import TaskFixture
from tests.support.waiting import FAIL_SAFE_S, eventually
from tests.support.workers import KEYS, make, now_ms, working

pytestmark = [pytest.mark.worker, pytest.mark.keys]


def explained(client: Client, key: str) -> dict[str, Any]:
    (found,) = call("why", "app.handle", key, "--json", url=client.url).json_lines()
    assert isinstance(found, dict)
    return found


def listed(client: Client, *words: str) -> dict[str, dict[str, Any]]:
    """What `millstream key` prints of each key."""
    return {one["key"]: one for one in call("key", *words, "--json", url=client.url).json_lines()}


def names_limit(client: Client, value: str, words: str, *command: str) -> bool:
    """Whether `millstream key` names the limit of the key `two`; not while its worker has leased it to ask again."""
    shown = listed(client, *command).get("two", {"limit": None})
    return (
        shown["limit"] == value
        and shown["why"].endswith(f"; it {words}")
        and words in call("key", *command, url=client.url).out
    )


def copy_of(message: Message) -> dict[str, str | None]:
    return {"n": message.text("n"), "key": message.text("key")}


def test_a_key_that_waits_for_its_limit_is_explained_with_the_value_and_those_that_run(
    client: Client, tmp_path: Path
) -> None:
    gate = threading.Event()

    def handle(message: Message) -> dict[str, str | None]:
        gate.wait(FAIL_SAFE_S)
        return copy_of(message)

    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1))
    client.execute("XADD", "in", "*", "n", 1, "key", "one", "tenant", "acme")
    with working(client, handler, "w1"):
        eventually(lambda: client.execute("HLEN", KEYS.permits(b"acme")) == 1, "the run")
        client.execute("XADD", "in", "*", "n", 2, "key", "two", "tenant", "acme")
        sentence = "It waits for the limit of app.handle for tenant acme: 1 message of it runs, 1 key waits for it."
        eventually(lambda: sentence in explained(client, "two")["why"], "the limit in the explanation")
        eventually(lambda: explained(client, "two")["limit"] == "acme", "the limit in JSON")
        eventually(lambda: explained(client, "two")["state"] == "backing off", "the wait")
        assert explained(client, "one")["limit"] is None
        in_words = sentence.removeprefix("It ").removesuffix(".")
        for words in (("list", "app.handle"), ("list",), ("show", "app.handle", "two")):
            eventually(partial(names_limit, client, "acme", in_words, *words), f"the limit in key {words}")
        assert listed(client, "list", "app.handle")["one"]["limit"] is None
        with console(client.url, tmp_path, "payloads") as browser:
            path = "/key?handler=app.handle&key=two"
            eventually(lambda: sentence in browser.get(path).text, "the limit on the page of the key")
        gate.set()
        eventually(lambda: client.execute("XLEN", "out") == 2, "all outputs")


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (Limit(at_once=1), "It waits for the limit of app.handle: 1 message of it runs, 1 key waits for it."),
        (Limit(per="a", at_once=1), "It waits for the limit of app.handle for a or b x: 1 message of it runs,"),
        (
            Limit(per="tenant", rate="1/d"),
            "It waits for the limit of app.handle for tenant acme: its rate lets the next message begin in ",
        ),
    ],
)
def test_a_deferred_key_on_spark_is_explained_likewise(
    client: Client, tmp_path: Path, limit: Limit, sentence: str
) -> None:
    fixture = TaskFixture(client)
    value = b"acme" if limit.per == "tenant" else b"x" if limit.per else b""
    if limit.rate is None:
        client.execute("HSET", KEYS.permits(value), "another task 1-0", f"t{now_ms(client) + 3_600_000:.0f}")
    else:
        client.execute("HSET", KEYS.free_at(value), "at", now_ms(client) + 3_600_000, "takes", 86_400_000)
    fields: dict[Any, Any] = {"n": 1, "key": "k", "tenant": "acme", "a": "x", "b": "x"}
    client.execute("XADD", "in", "1-0", *[part for item in fields.items() for part in item])
    report = fixture.process(make(copy_of, key="key", limit=limit), fixture.rows((1, b"k", fields)))
    assert sentence in explained(client, "k")["why"]
    in_words = sentence.removeprefix("It ").removesuffix(".")
    assert in_words in listed(client, "show", "app.handle", "k")["k"]["why"]
    with console(client.url, tmp_path, "payloads") as browser:
        for path in ("/stuck", "/handler?name=app.handle"):
            assert f"; it {in_words}" in browser.get(path).text
    if limit.per:
        with console(client.url, tmp_path, "payloads", redact=hide_fields(["tenant", "b"])) as browser:
            for path in ("/stuck", "/handler?name=app.handle", "/key?handler=app.handle&key=k"):
                text = browser.get(path).text
                assert sentence[3:].replace(f" {value.decode()}", " (redacted)") in text
                assert "acme" not in text
    assert not any("try it now" in one for one in explained(client, "k")["mend"])
    recorder = Recorder()
    report_batch(recorder, "app.handle", report)
    assert recorder.value(m.LIMITED, handler="app.handle") == report["limited"] > 0


def test_the_list_names_the_limit_of_each_of_many_keys_and_of_a_key_that_waits_after_a_failure_none(
    client: Client,
) -> None:
    def handle(message: Message) -> dict[str, str | None]:
        if message.text("tenant") == "failing":
            raise RuntimeError("no gateway")
        return copy_of(message)

    tenants = [*("acme", "zeta") * 25, "failing", "free"]
    fields: list[dict[Any, Any]] = [{"n": n, "key": f"k{n}", "tenant": one} for n, one in enumerate(tenants, 1)]
    for tenant in ("acme", "zeta"):
        client.execute("HSET", KEYS.permits(tenant.encode()), f"{tenant} 1-0", f"t{now_ms(client) + 3_600_000:.0f}")
    for one in fields:
        client.execute("XADD", "in", f"{one['n']}-0", *[part for item in one.items() for part in item])
    retry = Retry(attempts=3, delay_ms=3_600_000, max_delay_ms=3_600_000)
    fixture = TaskFixture(client)
    handler = make(handle, key="key", limit=Limit(per="tenant", at_once=1), retry=retry)
    fixture.process(handler, fixture.rows(*[(one["n"], one["key"].encode(), one) for one in fields]))
    found = listed(client, "list", "app.handle", "--limit", "100")
    wanted = {one["key"]: None if one["tenant"] == "failing" else one["tenant"] for one in fields[:-1]}
    assert {key: one["limit"] for key, one in found.items()} == wanted
    waits = "waits for the limit of app.handle for tenant zeta: 1 message of it runs, 25 keys wait for it"
    assert {key for key, one in found.items() if waits in one["why"]} == {*list(wanted)[1:50:2]}
    assert "limit" not in found["k51"]["why"]


def test_a_key_whose_limit_cannot_be_read_is_listed_without_it_beside_the_others(client: Client) -> None:
    tenants = ("acme", "zeta", "eta")
    fields: list[dict[Any, Any]] = [{"n": n, "key": one, "tenant": one} for n, one in enumerate(tenants, 1)]
    for one in fields:
        permits = KEYS.permits(one["tenant"].encode())
        client.execute("HSET", permits, "other 1-0", f"t{now_ms(client) + 3_600_000:.0f}")
        client.execute("XADD", "in", f"{one['n']}-0", *[part for item in one.items() for part in item])
    fixture = TaskFixture(client)
    handler = make(copy_of, key="key", limit=Limit(per="tenant", at_once=1))
    fixture.process(handler, fixture.rows(*[(one["n"], one["key"].encode(), one) for one in fields]))
    for key in (KEYS.limited(b"zeta"), KEYS.free_at(b"eta")):
        client.execute("DEL", key)
        client.execute("SET", key, "of another program")
    limits = {key: one["limit"] for key, one in listed(client, "list", "app.handle").items()}
    assert limits == {"acme": "acme", "zeta": None, "eta": None}
    client.execute("ACL", "SETUSER", "viewer", "on", ">secret", "+@all", "-xrange", "~*", "&*")
    with Client(client.url.replace("redis://", "redis://viewer:secret@")) as viewer:
        limits = {key: one["limit"] for key, one in listed(viewer, "list", "app.handle").items()}
    assert limits == dict.fromkeys(tenants)


def test_the_messages_of_keys_that_back_off_are_read_unless_all_code_that_runs_has_no_limit(client: Client) -> None:
    client.execute("HSET", KEYS.permits(b"acme"), "other 1-0", f"t{now_ms(client) + 3_600_000:.0f}")
    client.execute("XADD", "in", "1-0", "n", 1, "key", "two", "tenant", "acme")
    fixture = TaskFixture(client)
    limited = make(copy_of, key="key", limit=Limit(per="tenant", at_once=1))
    fixture.process(limited, fixture.rows((1, b"two", {"n": 1, "key": "two", "tenant": "acme"})))
    without, with_limit = (code_of([one], engine="workers", version="1") for one in (make(copy_of, key="key"), limited))
    for reported, is_read in (((), True), ((without,), False), ((without, with_limit), True), ((with_limit,), True)):
        client.execute("DEL", running_code_key("app", "handle"))
        for code in reported:
            report_code(client, "app", code)
        before = commands_run(client.execute)["xrange"]
        assert listed(client, "list", "app.handle")["two"]["limit"] == ("acme" if is_read else None)
        assert commands_run(client.execute)["xrange"] - before == is_read
