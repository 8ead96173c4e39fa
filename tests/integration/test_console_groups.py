"""The console sets the last delivered id of a consumer group as the command does, and says first what that does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.admin.group_moves import move, plan_move
from millstream.delivery.reliable_stream import ReliableStream
from millstream.groups import Consumer, Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.clocks import ManualClock
from tests.support.commandline import call
from tests.support.consoles import Browser, Page, console

pytestmark = [pytest.mark.cli, pytest.mark.groups]

PAGE = "/group?stream=in&group=readers"


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    """An administrator's; `readers` was given 6 of 10 entries, and `me` has acknowledged the first two."""
    client.pipeline([("XADD", "in", f"{n}-0", "n", n) for n in range(1, 11)])
    group = Group(client, "in", "readers")
    group.create()
    read_new(client, "me", 6)
    group.ack(["1-0", "2-0"])
    with console(client.url, tmp_path, "admin") as opened:
        yield opened


def read_new(client: Client, consumer: str, count: int = 100) -> list[str]:
    found = Consumer(client, group="readers", name=consumer, streams=["in"]).read_new(count=count)
    return [one.id.decode() for batch in found for one in batch]


def last_delivered(client: Client) -> str:
    found = Group(client, "in", "readers").info()
    assert found
    return found.last_delivered.decode()


def ask(browser: Browser, after: str) -> Page:
    """The question before the group is moved."""
    return browser.send(browser.get(PAGE), "/group/set-id", after=after)


def test_a_group_is_moved_back_once_what_is_delivered_again_is_confirmed(browser: Browser, client: Client) -> None:
    question = ask(browser, "1-0")
    assert (
        "from 6-0 to 1-0: 5 entries would be delivered again; its 4 pending entries stay pending, and pass to the "
        "consumer that gets them again."
    ) in question.text
    assert "millstream group set-id in readers --after 1-0" in question.text
    assert last_delivered(client) == "6-0"
    assert "The last delivered id is set." in browser.send(question, "/group/set-id").text
    assert last_delivered(client) == "1-0"
    record = AuditLog(client).read(count=1)[0]
    assert (record.action, record.about["before"], record.about["after"]) == ("group set-id", "6-0", "1-0")
    assert str(record.result).startswith("moved from 6-0 to 1-0: 5 entries")
    assert read_new(client, "other")[:5] == ["2-0", "3-0", "4-0", "5-0", "6-0"]
    owners = {one.id.decode(): one.consumer for one in Group(client, "in", "readers").pending.iter_entries()}
    assert owners == {f"{n}-0": "other" for n in range(2, 11)}, "as the question says"


def test_a_group_skips_to_the_end_or_a_time_once_that_is_confirmed(browser: Browser, client: Client) -> None:
    question = ask(browser, "latest")
    assert "to 10-0: 4 entries would be skipped; its 4 pending entries stay pending." in question.text
    client.execute("XADD", "in", "11-0", "n", 11)
    browser.send(question, "/group/set-id")
    assert last_delivered(client) == "11-0", "the end as it is by then"
    Group(client, "in", "readers").set_id("6-0")
    question = ask(browser, "1970-01-01T00:00:00.009")
    assert "2 entries would be skipped" in question.text, "the entry of that time itself is delivered"
    browser.send(question, "/group/set-id")
    assert read_new(client, "me") == ["9-0", "10-0", "11-0"]
    assert "no entry would be delivered again or skipped" in ask(browser, "11-0").text


def test_a_group_that_has_passed_the_id_meanwhile_is_asked_about_again(browser: Browser, client: Client) -> None:
    question = ask(browser, "8-0")
    assert "2 entries would be skipped" in question.text
    read_new(client, "me")
    again = browser.send(question, "/group/set-id")
    assert "The group has moved past this id since that was asked." in again.text
    assert "2 entries would be delivered again" in again.text
    assert last_delivered(client) == "10-0"
    assert AuditLog(client).read() == []
    browser.send(again, "/group/set-id")
    assert last_delivered(client) == "8-0"


def test_entries_are_counted_within_a_time_and_the_figure_says_if_there_are_more(client: Client) -> None:
    client.pipeline([("XADD", "long", f"{n}-0", "n", n) for n in range(1, 5_001)])
    Group(client, "long", "g").create("4999-0")
    found = plan_move(client, "long", "g", "500-0", budget_ms=0)
    assert (found.entries < 4_499, found.exact) == (True, False)
    assert found.describe().startswith("at least ")
    found = plan_move(client, "long", "g", "500-0", clock=ManualClock())  # on which no time passes
    assert (found.entries, found.exact) == (4_499, True)


def test_a_group_that_skips_to_the_end_skips_what_came_while_that_was_asked(client: Client) -> None:
    client.execute("XADD", "in", "1-0", "n", 1)
    Group(client, "in", "readers").create()
    planned = plan_move(client, "in", "readers", "latest")
    client.execute("XADD", "in", "2-0", "n", 2)
    assert (planned.to, move(client, planned)) == ("1-0", "2-0")


def test_a_group_does_not_move_to_a_time_in_the_future(browser: Browser, client: Client) -> None:
    words = ("group", "set-id", "in", "readers", "--yes", "--after")
    refused = call(*words, "2999-01-01", url=client.url)
    assert (refused.code, "is in the future" in refused.err) == (2, True)
    assert (ask(browser, "2999-01-01").status, last_delivered(client)) == (400, "6-0")
    assert call(*words, "1s", url=client.url).code == 0, (
        "after the last entry, and before all that are added from now on"
    )


def test_the_group_of_a_handler_is_not_moved_and_its_page_says_why(browser: Browser, client: Client) -> None:
    ReliableStream(client, "in", app="shop", handler="pay", consumer="w").join()
    name = HandlerKeys("shop", "pay", "in").group
    link = next(one for one in browser.get("/stream?name=in").links if one.startswith("/group") and "shop.pay" in one)
    page = browser.get(link)
    assert "It cannot be set: this is the group of the handler shop.pay" in page.text
    assert "/group/set-id" not in page.actions
    form = browser.get(PAGE).form("/group/set-id")
    refused = browser.post("/group/set-id", **{**form, "group": name, "after": "earliest", "confirm": "none"})
    assert (refused.status, "--reprocess" in refused.text) == (400, True)


def test_a_group_that_is_gone_is_no_page(browser: Browser, client: Client) -> None:
    question = ask(browser, "earliest")
    Group(client, "in", "readers").destroy()
    assert browser.get(PAGE).status == 404
    assert browser.send(question, "/group/set-id").status == 404
    assert browser.get("/group?stream=nope&group=readers").status == 404


@pytest.mark.parametrize("level", ["figures", "payloads", "operate"])
def test_a_lower_level_than_admin_moves_no_group(client: Client, browser: Browser, tmp_path: Path, level: str) -> None:
    form = browser.get(PAGE).form("/group/set-id")
    with console(client.url, tmp_path, level) as other:
        page = other.get(PAGE)
        assert (page.status, "/group/set-id" in page.actions) == (200, False)
        assert "me 4" in page.text
        assert other.post("/group/set-id", **{**form, "after": "earliest", "confirm": "back"}).status == 403
    assert last_delivered(client) == "6-0"


def test_the_command_says_what_the_page_says(browser: Browser, client: Client) -> None:
    words = ("group", "set-id", "in", "readers", "--after", "1-0", "--dry-run")
    assert call(*words, url=client.url).out == (
        "group readers would move from 6-0 to 1-0: 5 entries would be delivered again; its 4 pending entries stay "
        "pending, and pass to the consumer that gets them again\n"
    )
    assert call(*words, "--json", url=client.url).json() == {
        "stream": "in",
        "group": "readers",
        "before": "6-0",
        "to": "1-0",
        "direction": "back",
        "entries": 5,
        "exact": True,
        "pending": 4,
        "now": "6-0",
        "dry_run": True,
    }
    assert "entries would be" in ask(browser, "1-0").text
