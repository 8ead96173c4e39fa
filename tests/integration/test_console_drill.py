"""A drill: a poisoned message holds up its key, and an operator finds and ends that, by the console or by commands alone."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from millstream import Message, Retry
from millstream.admin.key_queues import count_parked
from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.commandline import call
from tests.support.consoles import Browser, Page, console
from tests.support.waiting import eventually
from tests.support.workers import KEYS, dead, make, working

pytestmark = [pytest.mark.cli]

FIRST, LATER = (1, 2), (3, 4)
"""The amounts of the key before and after the poisoned one, which is `ten`."""
CAUSE = "invalid literal for int() with base 10: 'ten'"
WAYS = pytest.mark.parametrize("mends", [False, True], ids=["skipped", "skipped and redriven with another field"])
LINKS = {
    "the attention list": r'data-key="parked app\.handle">.*?<a href="([^"]*)">Show</a>',
    "the page Stuck": r'<a href="(/stuck)"',
}
"""Where the overview leads, by the part of it in which the link is."""


def charge(message: Message) -> dict[str, Any]:
    return {"account": message.text("account"), "amount": int(str(message.text("amount")))}


def publish(client: Client, account: str, *amounts: int | str) -> None:
    client.pipeline([("XADD", "in", "*", "account", account, "amount", amount) for amount in amounts])


def charged(client: Client, account: str) -> list[int]:
    """The amounts of an account that were processed, in their order."""
    found = [mapping_of(pairs) for _, pairs in client.execute("XRANGE", "out", "-", "+")]
    return [int(one[b"amount"]) for one in found if one[b"account"] == account.encode()]


@pytest.fixture
def stuck(client: Client) -> Iterator[Client]:
    """A worker has parked the key `ann` at its third message, and processed those of another key."""
    handler = make(charge, key="account", retry=Retry(attempts=2, delay_ms=10, then="park"))
    with working(client, handler):
        publish(client, "ann", *FIRST, "ten", *LATER)
        publish(client, "bob", 5)
        eventually(lambda: count_parked(client, [KEYS])[0] == 1, "the key to be parked")
        eventually(lambda: charged(client, "bob") == [5], "the message of the other key")
        assert charged(client, "ann") == [*FIRST], "the key waits"
        yield client


@contextmanager
def timed(capsys: pytest.CaptureFixture[str], what: str) -> Iterator[None]:
    """Print how long the block took."""
    began = time.perf_counter()
    yield
    with capsys.disabled():
        print(f"\n  {what}: {time.perf_counter() - began:.2f} s")  # noqa: T201


def await_the_rest(client: Client, *, mends: bool) -> None:
    """The messages behind the poisoned one are processed in order, and that itself last, if it was mended."""
    expected = [*FIRST, *LATER, *((10,) if mends else ())]
    eventually(
        lambda: charged(client, "ann") == expected, "the messages of the key", log=lambda: charged(client, "ann")
    )
    assert len(dead(client)) == (0 if mends else 1)


def follow(browser: Browser, page: Page, beginning: str) -> Page:
    """The page behind the first link that begins so."""
    found = browser.get(next(one for one in page.links if one.startswith(beginning)))
    assert found.status == 200, found.text
    return found


@WAYS
@pytest.mark.parametrize("by_way_of", LINKS)
def test_an_operator_finds_a_stuck_key_in_the_console_by_links_and_lets_it_continue(
    stuck: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_way_of: str, mends: bool
) -> None:
    with (
        console(stuck.url, tmp_path, "admin" if mends else "operate") as browser,
        timed(capsys, f"by the console, by way of {by_way_of}"),
    ):
        first = browser.get("/")
        assert "app.handle: 1 parked key" in first.text
        (link,) = re.findall(LINKS[by_way_of], first.html, re.DOTALL)
        page = follow(browser, browser.get(unescape(link)), "/key?")
        for shown in ("waits: parked for", CAUSE, "Traceback", "amount ten", "millstream key unpark app.handle ann"):
            assert shown in page.text, shown
        page = browser.send(browser.send(page, "/key/skip"), "/key/skip")
        assert "The first message is a dead letter now." in page.text
        assert "The key goes on." in browser.send(page, "/key/unpark").text
        if mends:
            form = follow(browser, follow(browser, page, "/letter?"), "/letter/edit")
            fields = form.form("/letter/edit")
            (row,) = [name.removeprefix("name") for name, values in fields.items() if values == ["amount"]]
            question = browser.send(form, "/letter/edit", **{f"value{row}": "10"})
            assert "amount: ten becomes 10" in question.text
            assert "is redriven as" in browser.send(question, "/letter/edit").text
        await_the_rest(stuck, mends=mends)
        assert "parked key" not in browser.get("/").text


@WAYS
def test_an_operator_finds_a_stuck_key_by_commands_and_lets_it_continue(
    stuck: Client, capsys: pytest.CaptureFixture[str], mends: bool
) -> None:
    def command(*words: str) -> Any:
        done = call(*words, "--json", url=stuck.url)
        assert done.out, done.err
        return done.json_lines()[0]

    with timed(capsys, "by commands"):
        found = {one["check"]: one for one in command("doctor")["findings"] if one["severity"] != "ok"}
        assert found["parked"]["mend"][0] == "millstream key list app.handle"
        row = command("key", "list", "app.handle")
        assert (row["key"], row["state"], row["messages"]) == ("ann", "parked", 3)
        why = command("why", "app.handle", row["key"])
        assert "waits: parked for" in why["why"]
        assert CAUSE in why["error"]
        assert command("key", "skip", "app.handle", row["key"], "--yes")["skipped"] == {"in": row["first"]}
        assert command("key", "unpark", "app.handle", row["key"])["unparked"]
        if mends:
            letter = command("dlq", "list", "app.handle")
            edited = command("dlq", "edit", letter["letter_id"], "--set", "amount=10", "--yes")
            assert (edited["changed"], bool(edited["new_id"])) == (["amount"], True)
        await_the_rest(stuck, mends=mends)
        assert "parked" not in {one["check"] for one in command("doctor")["findings"] if one["severity"] != "ok"}
