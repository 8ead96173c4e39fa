"""Operators see which code runs a handler, with which settings, and that two versions of it run at the same time."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from millstream import After, App, Breaker, Limit, Message, Retry, State
from millstream.delivery.running_code import RunningCode, code_of, read_code, report_code
from millstream.handlers.code_settings import settings_of, source_of
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import running_code_key
from millstream.services.console import Level
from millstream.worker.static_membership import StaticMembership
from tests.support.commandline import running
from tests.support.consoles import authorized, fill_with
from tests.support.running_codes import CODE
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.cli]

SOURCE = """
from millstream import App, Message, Retry

app = App("shop")

@app.handler("orders", into="done", retry=Retry(attempts=7))
def pay(message: Message):
    return None
"""


def codes(client: Client) -> Sequence[RunningCode]:
    return read_code(client, [("shop", "pay")])["shop", "pay"]


def test_settings_that_are_set_are_short_text_by_the_names_of_the_options() -> None:
    app = App("shop")

    def customer(message: Message) -> bytes:
        return message.fields["customer"]

    @app.handler(
        "orders",
        "returns",
        key=customer,
        retry=Retry(attempts=2, then="park"),
        limit=Limit(per="tenant", at_once=4),
        time_limit_ms=1_500,
        state_ttl_ms=86_400_000,
        breaker=Breaker(first=5),
    )
    def pay(message: Message, state: State) -> After | None:
        return None

    @app.handler(pattern="calls:*", batch_size=50, breaker=None)
    def ring(messages: list[Message]) -> None:
        """A handler."""

    assert settings_of(app.handlers["pay"]) == {
        "streams": "orders, returns",
        "key": "customer",
        "retry": "attempts=2, delay_ms=100, factor=2, max_delay_ms=10,000, jitter=0.1, then=park",
        "missing_key": "dead-letter",
        "concurrency": "100",
        "time_limit_ms": "1,500",
        "state_ttl_ms": "86,400,000",
        "limit": "per=tenant, at_once=4",
        "order": "key",
        "breaker": "first=5, share=0.9, window=100",
    }
    found = settings_of(app.handlers["ring"])
    assert (found["pattern"], found["batch_size"], found["batch_wait_ms"]) == ("calls:*", "50", "0")
    assert not found.keys() & {"streams", "key", "limit", "breaker"}


def test_the_name_of_the_code_changes_with_its_file() -> None:
    def pay(message: Message) -> None:
        """A handler."""

    name, _, digest = source_of(pay).partition(" ")
    assert (name, len(digest)) == (Path(__file__).name, 8)
    made: dict[str, object] = {}
    exec("def of_no_file(message): ...", made)
    assert source_of(made["of_no_file"]) == ""  # type: ignore[arg-type]


def test_workers_with_the_same_code_report_it_once_and_those_of_another_version_beside_it(client: Client) -> None:
    fill_with(client, "x")
    assert codes(client) == []
    with authorized(client.url, Level.FIGURES) as browser:
        assert "No worker and no run reports them now." in browser.get("/handler?name=shop.pay").text
        memberships = [StaticMembership(client, "shop", name, handlers={"pay": CODE}) for name in ("a", "b")]
        for one in memberships:
            one.acquire(1)

        def shows(path: str, text: str) -> bool:
            for one in memberships:
                one.renew()  # as a supervisor does: a report lasts 30 s
            return text in browser.get(path).text

        assert codes(client) == [CODE]
        reported = "On workers: shop.py 0123abcd, millstream 1.2.3 streams orders key n"
        eventually(lambda: shows("/handler?name=shop.pay", reported), "its report")
        assert "at the same time" not in browser.get("/handler?name=shop.pay").text
        newer = msgspec.structs.replace(CODE, source="shop.py 4567cdef")
        memberships.append(StaticMembership(client, "shop", "c", handlers={"pay": newer}))
        memberships[-1].acquire(1)
        for one in memberships:
            one.renew()
        assert {one.source for one in codes(client)} == {CODE.source, newer.source}
        twice = "2 versions of this handler run at the same time"
        eventually(lambda: shows("/handler?name=shop.pay", twice), "both versions of the handler")
        shown = "shop.py 0123abcd (millstream 1.2.3); shop.py 4567cdef (millstream 1.2.3)"
        eventually(lambda: shows("/workers", shown), "both versions")
    client.execute("DEL", running_code_key("shop", "pay"))
    client.execute("SET", running_code_key("shop", "pay"), "of another program")
    assert codes(client) == []


def test_a_worker_reports_the_code_and_the_settings_of_its_app(client: Client, tmp_path: Path) -> None:
    (tmp_path / "shop_of_code.py").write_text(SOURCE)
    with running("worker", f"{tmp_path}/shop_of_code.py:app", url=client.url):
        (code,) = eventually(lambda: codes(client), "its report")
    assert code.source.startswith("shop_of_code.py ")
    assert code.settings["retry"].startswith("attempts=7, ")


def test_reports_end_by_themselves(client: Client) -> None:
    app = App("shop")
    app.handler("orders", name="pay")(lambda message: None)
    report_code(client, "shop", code_of(app.handlers.values(), engine="spark", version="1"))
    assert [one.engine for one in codes(client)] == ["spark"]
    assert 0 < client.execute("PTTL", running_code_key("shop", "pay")) <= 30_000
