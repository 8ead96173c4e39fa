"""The console edits a dead letter in a form and redrives the copy, as the command does."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from millstream.admin.audit_log import AuditLog
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import EDITED_FIELD, REDRIVE_FIELD
from millstream.services.console import Level
from tests.support.consoles import Browser, Page, authorized, console
from tests.support.dead_letters import KEYS, add_dead_letter, entries, left

pytestmark = [pytest.mark.cli]

PAIRS = (b"account", b"ann", b"card", b"visa4111", b"raw", b"\xff\r\n\\<b>")  # no id and no token can contain it
MARK = [REDRIVE_FIELD, b"shop.pay"]


def add(client: Client, pairs: Sequence[bytes] = PAIRS, error: str = "ValueError: no") -> str:
    """A dead letter of `shop.pay` with these fields, of a handler that has workers; its id."""
    client.execute("HSET", KEYS.meta, "owner", "workers")
    return add_dead_letter(client, pairs, error)


def edit_page(browser: Browser, letter_id: str) -> Page:
    """The form of a dead letter, reached by the link on its page."""
    page = browser.get(f"/letter?handler=shop.pay&stream=orders&id={letter_id}")
    return browser.get(next(one for one in page.links if one.startswith("/letter/edit")))


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    with console(client.url, tmp_path, "admin") as opened:
        yield opened


def test_a_dead_letter_is_edited_in_a_form_and_its_copy_is_redriven(browser: Browser, client: Client) -> None:
    letter_id = add(client)
    changed = {"value0": "bob", "name1": "", "name3": "note", "value3": "first\r\nsecond"}
    question = browser.send(edit_page(browser, letter_id), "/letter/edit", **changed)
    assert "Its fields would be those of the form: account changed; note added; card removed." in question.text
    assert "account: ann becomes bob" in question.text
    command = (
        f"millstream dlq edit shop.pay {letter_id} --stream orders --set account=VALUE --set note=VALUE --remove card"
    )
    assert command in question.text
    assert (left(client), entries(client)) == (1, [])
    done = browser.send(question, "/letter/edit")
    assert f"The edited copy of dead letter {letter_id} is redriven as " in done.text
    record = AuditLog(client).read(count=1)[0]
    assert entries(client) == [
        [
            *MARK,
            *(b"account", b"bob", b"raw", b"\xff\r\n\\<b>", b"note", b"first\nsecond"),
            *(EDITED_FIELD, record.by.encode()),
        ]
    ]
    assert left(client) == 1
    assert "The dead letter stays until the copy is committed." in done.text
    assert (record.action, record.about["id"], record.about["fields"]) == (
        "dlq edit",
        letter_id,
        "account changed; note added; card removed",
    )
    assert str(record.result).startswith("redriven as ")
    again = browser.send(question, "/letter/edit")
    assert "Not redriven: its edited copy is under way" in again.text
    assert len(entries(client)) == 1


def test_a_dead_letter_whose_copy_is_under_way_says_so_and_cannot_be_redriven(browser: Browser, client: Client) -> None:
    letter_id, other = add(client), add(client, (b"n", b"1"), "KeyError: 1")
    group = browser.get(next(one for one in browser.get("/letters?handler=shop.pay").links if "ValueError" in one))
    asked = browser.send(browser.get("/letters?handler=shop.pay"), "/letters/redrive")
    browser.send(browser.send(edit_page(browser, letter_id), "/letter/edit", value0="bob"), "/letter/edit")
    (copy_id,) = [one.decode() for one, _ in client.execute("XRANGE", "orders", "-", "+")]
    address = f"/letter?handler=shop.pay&stream=orders&id={letter_id}"
    page = browser.get(address)
    assert f"{copy_id} is under way: the dead letter goes with its commit" in page.text
    assert ("/letters/redrive" in page.actions, any("/letter/edit" in one for one in page.links)) == (False, False)
    form = browser.get(address.replace("/letter?", "/letter/edit?"))
    assert f"Its edited copy {copy_id} is under way" in form.text
    assert "/letter/edit" not in form.actions
    assert f"{letter_id}, edited copy {copy_id} under way" in browser.get(group.url).text
    refused = browser.send(group, "/letters/redrive")
    assert (refused.status, "an edited copy of each is under way" in refused.text) == (409, True)
    question = browser.send(asked, "/letters/redrive")
    assert "1 more would stay, as an edited copy of each is under way." in question.text
    purge = browser.send(browser.get("/letters?handler=shop.pay"), "/letters/purge")
    assert "Edited copies of 1 of them are under way, and go on." in purge.text
    assert "1 dead letter redriven." in browser.send(question, "/letters/redrive").text
    assert [one.letter_id for one in DeadLetterQueue(client).find(DeadLetterFilter())] == [letter_id] != [other]


def test_the_fields_before_an_edit_are_shown_and_can_be_the_beginning_of_the_next(
    browser: Browser, client: Client
) -> None:
    letter_id = add(client, [b"account", b"bob", b"card", b"4111", EDITED_FIELD, b"ann"])
    entry = client.execute("XRANGE", KEYS.dead_letters, letter_id, letter_id)[0][1]
    packed = msgspec.msgpack.encode([b"account", b"ann", b"cvc", b"1"])
    client.execute("DEL", KEYS.dead_letters)
    letter_id = client.execute("XADD", KEYS.dead_letters, "*", *entry, "before_edit", packed).decode()
    assert (
        "Fields before the edit account ann cvc 1"
        in browser.get(f"/letter?handler=shop.pay&stream=orders&id={letter_id}").text
    )
    page = edit_page(browser, letter_id)
    before = browser.get(next(one for one in page.links if "original=yes" in one))
    question = browser.send(before, "/letter/edit", value0="eve", name1="")
    assert "account changed; card removed" in question.text
    assert f"dlq edit shop.pay {letter_id} --stream orders --original --set account=VALUE --remove cvc" in question.text
    browser.send(question, "/letter/edit")
    (pairs,) = entries(client)
    assert pairs[2:-1] == [b"account", b"eve", EDITED_FIELD]
    plain = add(client)
    assert browser.get(f"/letter/edit?handler=shop.pay&stream=orders&id={plain}&original=yes").status == 404


def test_a_form_that_changes_nothing_keeps_every_byte(browser: Browser, client: Client) -> None:
    question = browser.send(edit_page(browser, add(client)), "/letter/edit")
    assert "no field is changed" in question.text
    browser.send(question, "/letter/edit")
    (pairs,) = entries(client)
    assert pairs[:-1] == [*MARK, *PAIRS, EDITED_FIELD]


def test_a_value_that_is_hidden_or_too_long_stays_as_it_is_or_is_left_out(client: Client) -> None:
    long = b"x" * 70_000
    letter_id = add(client, [*PAIRS, b"long", long])

    def redact(name: str, text: str) -> str:
        return "(hidden)" if name == "card" else text

    with authorized(client.url, Level.ADMIN, redact=redact) as browser:
        page = edit_page(browser, letter_id)
        assert "card: its value is not shown, and stays as it is." in page.text
        assert ("visa4111" in page.html, "x" * 1_000 in page.html) == (False, False)
        question = browser.send(page, "/letter/edit", value0="bob", name4="card", value4="visa5111")
        assert ("card: (hidden) becomes (hidden)" in question.text, "visa4111" in question.html) == (True, False)
        question = browser.send(page, "/letter/edit", value0="bob", remove1="yes")
        browser.send(question, "/letter/edit")
    (pairs,) = entries(client)
    assert pairs[2:-2] == [b"account", b"bob", b"raw", b"\xff\r\n\\<b>", b"long", long]


def test_a_form_that_makes_no_message_is_refused_in_one_sentence(browser: Browser, client: Client) -> None:
    letter_id = add(client, [b"n", b"1"])
    page = edit_page(browser, letter_id)
    refused = browser.send(page, "/letter/edit", name0="")
    assert (refused.status, "a message needs at least one field" in refused.text) == (400, True)
    assert browser.send(page, "/letter/edit", value0="\\x").status == 400
    assert browser.get("/letter/edit?handler=shop.pay&stream=orders&id=1-1").status == 404
    many = [one for n in range(600) for one in (b"f%d" % n, b"")]
    page = edit_page(browser, add(client, many))
    assert "It is too large for a form." in page.text
    assert "/letter/edit" not in page.actions
    assert (left(client), AuditLog(client).read()) == (2, [])


def test_a_dead_letter_that_a_purge_takes_before_the_copy_is_added_is_not_doubled(
    browser: Browser, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = browser.send(edit_page(browser, add(client)), "/letter/edit")
    inner = DeadLetterQueue.redrive_edited

    def purge_first(queue: DeadLetterQueue, *args: object, **options: object) -> object:
        assert queue.purge(queue.select(DeadLetterFilter(app="shop"))) == 1
        return inner(queue, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeadLetterQueue, "redrive_edited", purge_first)
    page = browser.send(question, "/letter/edit")
    assert "Not redriven: it is not in the queue any more: another redrive or purge removed it" in page.text
    assert str(AuditLog(client).read(count=1)[0].result).startswith("not redriven: it is not in the queue any more")
    assert entries(client) == []


@pytest.mark.parametrize("level", ["figures", "payloads", "operate"])
def test_a_lower_level_than_admin_edits_no_dead_letter(
    browser: Browser, client: Client, tmp_path: Path, level: str
) -> None:
    letter_id = add(client)
    form = edit_page(browser, letter_id).form("/letter/edit")
    with console(client.url, tmp_path, level) as other:
        assert other.post("/letter/edit", **form, confirm="edit").status == 403
        assert other.get(f"/letter/edit?handler=shop.pay&stream=orders&id={letter_id}").status == 403
        page = other.get(f"/letter?handler=shop.pay&stream=orders&id={letter_id}")
        assert [one for one in page.links if one.startswith("/letter/edit")] == []
    assert (left(client), entries(client)) == (1, [])
