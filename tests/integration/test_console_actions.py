"""What operators do through the console has the effect of the command, asks where the command asks, and is recorded."""

import re
import shlex
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

from millstream.admin.audit_log import AuditLog, AuditRecord
from millstream.admin.dead_letter_groups import find_letters
from millstream.admin.key_queues import count_parked, read_queues, unpark
from millstream.admin.worker_drains import find_worker
from millstream.delivery.commit_store import CommitStore
from millstream.delivery.dead_letter_queue import DeadLetterFilter, DeadLetterQueue
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.delivery.keyed_stream import LeaseRelease, queue_of_key
from millstream.errors import MillstreamError, Unavailable
from millstream.handlers.dead_letter import DeadLetter
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, audit_key
from millstream.services.console import Level
from millstream.services.console.views import keys
from tests.support.commandline import call
from tests.support.consoles import Browser, Page, authorized, console, fill_with
from tests.support.keyed_fixtures import joined_by_field
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

KEYS = HandlerKeys("shop", "pay", "orders")
PARKED, FAILING = "/key?handler=shop.pay&key=parked+x", "/key?handler=shop.pay&key=failing+x"
LETTERS = "/letters?handler=shop.pay"


@pytest.fixture
def browser(client: Client, tmp_path: Path) -> Iterator[Browser]:
    """An administrator's; the parked key `parked x` has three messages, `failing x` one that is retried without end."""
    fill_with(client, "x")
    with console(client.url, tmp_path, "admin") as opened:
        yield opened


def last(client: Client) -> AuditRecord:
    return AuditLog(client).read(count=1)[0]


def add_letters(client: Client, *errors: str, stream: str = "orders") -> list[str]:
    """Dead letters of `shop.pay` with these errors."""
    keys = HandlerKeys("shop", "pay", stream)
    letters = [
        DeadLetter(
            stream=stream,
            id=f"{n}-0",
            pairs=[b"n", b"%d" % n],
            key=None,
            app="shop",
            handler="pay",
            attempts=1,
            reason="failed",
            error=error,
            time_ms=n,
        )
        for n, error in enumerate(errors, 10)
    ]
    return [client.execute("XADD", keys.dead_letters, "*", *one.items()).decode() for one in letters]


def errors_left(client: Client) -> list[str]:
    found = DeadLetterQueue(client).find(DeadLetterFilter(app="shop", handler="pay"))
    return [one.letter.error for one in found if one.letter]


def is_paused(client: Client) -> bool:
    (row,) = call("info", "--json", url=client.url).json()["handlers"]
    return bool(row["paused"])


def test_a_handler_is_paused_and_resumed(browser: Browser, client: Client) -> None:
    page = browser.get("/handler?name=shop.pay")
    assert "paused by its breaker" in page.text
    page = browser.send(page, "/handler/resume")
    assert (is_paused(client), "The handler goes on." in page.text) == (False, True)
    page = browser.send(page, "/handler/pause")
    assert (is_paused(client), "it reads nothing new" in page.text) == (True, True)
    assert (last(client).action, last(client).result) == ("pause", "paused on 1 stream")


def test_the_rate_of_a_handler_is_set_and_cleared_as_the_commands_do(browser: Browser, client: Client) -> None:
    page = browser.get("/handler?name=shop.pay")
    assert "as in code" in page.text
    page = browser.send(page, "/handler/rate", rate="60/m")
    assert ("The rate is set" in page.text, "1/s, set by an operator, since" in page.text) == (True, True)
    (row,) = call("rate", "show", "shop.pay", "--json", url=client.url).json_lines()
    assert row["rate"] == 1
    record = last(client)
    assert (record.action, record.about, record.result) == (
        "rate set",
        {"handler": "shop.pay", "rate": "1/s"},
        "set on 1 stream",
    )
    for text in ("0", ""):
        refused = browser.send(page, "/handler/rate", rate=text)
        assert (refused.status, "a number of messages a second, at least 0.000001" in refused.text) == (400, True)
    (row,) = call("rate", "show", "shop.pay", "--json", url=client.url).json_lines()
    assert row["rate"] == 1
    page = browser.send(page, "/handler/rate/clear")
    assert "The rate in code holds again." in page.text
    (row,) = call("rate", "show", "shop.pay", "--json", url=client.url).json_lines()
    assert row["rate"] is None
    assert (last(client).action, last(client).about, last(client).result) == (
        "rate clear",
        {"handler": "shop.pay"},
        "cleared on 1 stream",
    )


def test_the_page_of_a_handler_shows_on_which_streams_a_rate_holds(browser: Browser, client: Client) -> None:
    client.execute("XADD", "returns", "*", "n", "1")
    client.execute("HSET", HandlerKeys("shop", "pay", "returns").meta, "committed_id", "0-0", "owner", "workers")
    CommitStore(client, app="shop", handler="pay").set_rate(["returns"], 1)
    page = browser.get("/handler?name=shop.pay")
    assert re.search(r"rate 1/s, set by an operator, since \S+, on 1 of 2 streams", page.text)
    assert re.search(r"returns workers\S*, rate 1/s", page.text)
    assert page.text.count("rate 1/s") == 2


def test_a_key_shows_why_it_waits_and_is_unparked_and_parked_with_a_reason(browser: Browser, client: Client) -> None:
    page = browser.get(PARKED)
    for shown in (
        "waits: parked for",
        "failed: x",
        "millstream key unpark shop.pay",
        "2 x",
        '"card": "x"',
        "3",
        "ValueError: x",
    ):
        assert shown in page.text, shown
    page = browser.send(page, "/key/unpark")
    assert (count_parked(client, [KEYS])[0], "The key goes on." in page.text) == (0, True)
    page = browser.send(page, "/key/park", reason="the bank is closed")
    (row,) = call("key", "show", "shop.pay", "parked x", "--json", url=client.url).json_lines()
    assert row["parked"] == "the bank is closed"
    assert "The key is parked" in page.text
    record = last(client)
    assert record.by.startswith("token ")
    assert (record.action, record.result) == ("key park", "parked")
    about = {"handler": "shop.pay", "stream": "orders", "key": "parked x", "reason": "the bank is closed"}
    assert record.about == about


def test_a_page_says_that_something_was_done_only_where_the_console_has_done_it(
    browser: Browser, client: Client, tmp_path: Path
) -> None:
    text = "The key is parked, from the end"
    place = "/key?handler=shop.pay&stream=orders&key=failing+x"
    page = browser.send(browser.get(place), "/key/park")
    assert text in page.text
    assert text in browser.get(f"{page.url}&refresh=60").text
    for forged in (
        f"{place}&done=parked",
        f"{place}&done=parked&signature={'0' * 32}",
        f"{place}&done=parked&signature=%ff",
    ):
        assert text not in browser.get(forged).text, forged
    assert text not in browser.get(page.url.replace("failing", "parked")).text, "of another key"
    assert "The key goes on." not in browser.get(page.url.replace("done=parked", "done=unparked")).text
    assert "is paused: it reads nothing new" not in browser.get("/handler?name=shop.pay&done=paused").text
    assert browser.send(browser.get(place), "/key/unpark").url.startswith(
        f"http://127.0.0.1{place}&done=unparked&signature="
    )
    with console(client.url, tmp_path, "admin") as other:
        assert text not in other.get(page.url).text, "in another browser"


def test_a_refusal_of_redis_is_recorded_as_a_failure(
    browser: Browser, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a replica: it has replied, and changed nothing."""

    def refuse(*_: Any) -> bool:
        raise Unavailable("Redis is a replica")

    monkeypatch.setattr(keys, "unpark_queue", refuse)
    page = browser.send(browser.get(PARKED), "/key/unpark")
    assert (page.status, "may have been done" in page.text) == (503, False)
    assert last(client).result == "failed: Redis is a replica"


def test_the_empty_key_has_a_page_and_forms(browser: Browser, client: Client) -> None:
    park_elsewhere(client, "parcels", "")
    stuck = browser.get("/stuck")
    page = browser.get(next(one for one in stuck.links if one.endswith("key=")))
    assert "parked for" in page.text
    page = browser.send(page, "/key/unpark")
    assert (page.status, "The key goes on." in page.text) == (200, True)


def test_a_message_is_skipped_only_if_it_is_the_one_that_was_confirmed(browser: Browser, client: Client) -> None:
    question = browser.send(browser.get(PARKED), "/key/skip")
    (queue,) = read_queues(client, KEYS, [queue_of_key(b"parked x", b"")])
    assert queue.first_id in question.text
    assert queue.length == 3, "the question changes nothing"
    assert "The first message is a dead letter now." in browser.send(question, "/key/skip").text
    assert browser.send(question, "/key/skip").text.count("the first message is another one now") == 1
    (after,) = read_queues(client, KEYS, [queue_of_key(b"parked x", b"")])
    assert (after.length, after.state) == (2, "parked")
    assert errors_left(client)[-1].startswith("skipped by token ")
    assert [one.result for one in AuditLog(client).read(count=2)] == [
        "not skipped: another message is the first one",
        "skipped",
    ]


def test_the_links_of_a_question_lead_back_and_nowhere_else(browser: Browser) -> None:
    question = browser.send(browser.get(PARKED), "/key/skip")
    assert [path for path in question.links if path.startswith("/") and browser.get(path).status != 200] == []
    assert any(path.startswith("/key?handler=shop.pay&stream=orders&key=parked") for path in question.links)
    assert "Reload every" not in question.text


def test_a_state_is_reset_once_that_is_confirmed(browser: Browser, client: Client) -> None:
    question = browser.send(browser.get(PARKED), "/key/reset")
    assert client.execute("HLEN", KEYS.state) == 1
    assert "The state is deleted" in browser.send(question, "/key/reset").text
    assert client.execute("HLEN", KEYS.state) == 0
    assert (last(client).action, last(client).result) == ("state reset", "reset")


# --- What is stuck ---


def park_elsewhere(client: Client, stream: str, *keys: str) -> None:
    """Park keys of another handler on a stream."""
    store = joined_by_field(client, stream, app="shop", handler="ship")
    for key in keys:
        client.execute("XADD", stream, "*", "key", key, "n", 1)
    store.enqueue_new(count=100, max_pending=1_000)
    leases = store.lease_keys(queues=9, entries=10, run=1, lease_ms=60_000, now_ms=0).leases
    store.release_leases([LeaseRelease(one, "park", "no stock", 3) for one in leases])


def parked_in(client: Client, stream: str) -> int:
    return count_parked(client, [HandlerKeys("shop", "ship", stream)])[0]


def test_one_page_lists_the_stuck_keys_and_dead_letters_of_all_handlers(browser: Browser, client: Client) -> None:
    client.pipeline([("XADD", f"idle:{n}", "*", "n", n) for n in range(1_500)])
    park_elsewhere(client, "parcels", "a b")
    link = next(one for one in browser.get("/").links if one == "/stuck")
    eventually(lambda: "There may be more" not in browser.get(link).text, "the end of the search")
    page = browser.get(link)
    for shown in (
        "parked x shop.pay parked 3",
        "failing x shop.pay backing off 1",
        "a b shop.ship parked 1",
        "no stock",
    ):
        assert shown in page.text, shown
    assert "streams shop.pay 1 1 The commands" in page.text, "one dead letter on one stream"
    for link in ("/key?handler=shop.ship&stream=parcels&key=a+b", "/letters?handler=shop.pay"):
        assert browser.get(next(one for one in page.links if one == link)).status == 200, link


def test_several_parked_keys_are_unparked_at_once_and_the_others_stay(browser: Browser, client: Client) -> None:
    park_elsewhere(client, "parcels", "a b", "c&d", "e")
    page = browser.get("/stuck")
    ticks = {
        dict(parse_qsl(one))["key"]: one for one in map(unescape, re.findall(r'name="stuck" value="(.*?)"', page.html))
    }
    assert set(ticks) == {"parked x", "a b", "c&d", "e"}, "none that goes on by itself"
    form = page.form("/stuck/unpark")
    assert "no key is selected" in browser.post("/stuck/unpark", **form).text
    page = browser.post("/stuck/unpark", **form, stuck=[ticks["a b"], ticks["c&d"], ticks["parked x"]])
    assert "The selected keys go on." in page.text
    assert (parked_in(client, "parcels"), count_parked(client, [KEYS])[0]) == (1, 0)
    assert [(one.action, one.about["key"], one.result) for one in AuditLog(client).read(count=3)] == [
        ("key unpark", key, "unparked") for key in ("parked x", "c&d", "a b")
    ]
    page = browser.post("/stuck/unpark", **form, stuck=[ticks["a b"], ticks["e"]])
    assert "Some of the selected keys were not parked any more, or could not be" in page.text
    assert parked_in(client, "parcels") == 0


def test_dead_letters_are_grouped_by_reason_and_error_without_its_numbers(browser: Browser, client: Client) -> None:
    first, *_, final = add_letters(client, "order 7 is broken", "order 8 is broken", "order 9 is broken")
    page = browser.get(LETTERS)
    assert "4 in 2 groups" in page.text
    assert "order N is broken failed 3" in page.text
    assert first in page.text
    link = next(one for one in page.links if "order+N" in one)
    assert final in browser.get(link).text


def test_groups_of_dead_letters_hold_no_messages(browser: Browser, client: Client) -> None:
    add_letters(client, "order 7 is broken")
    client.execute("XADD", KEYS.dead_letters, "*", "foreign", "x" * 1_000)
    found = find_letters(client, app="shop", handler="pay").letters
    assert [[*one.pairs, *(one.letter.pairs if one.letter else ())] for one in found] == [[]] * 3
    page = browser.get(LETTERS)
    assert "3 in 3 groups" in page.text
    assert "unreadable" in page.text


def test_a_group_of_dead_letters_is_redriven_after_a_dry_run(browser: Browser, client: Client) -> None:
    add_letters(client, "order 7 is broken", "order 8 is broken")
    group = browser.get(next(one for one in browser.get(LETTERS).links if "order+N" in one))
    length = client.execute("XLEN", "orders")
    question = browser.send(group, "/letters/redrive")
    assert "2 dead letters would be redriven: 2 of orders." in question.text
    assert client.execute("XLEN", "orders") == length
    assert "2 dead letters redriven." in browser.send(question, "/letters/redrive").text
    assert client.execute("XLEN", "orders") == length + 2
    assert errors_left(client) == ["ValueError: x"]
    assert last(client).result == "2 of 2 redriven"
    assert browser.send(question, "/letters/redrive").status == 404, "they are gone"


def test_a_step_that_leaves_dead_letters_says_so_in_its_question_and_its_result(
    browser: Browser, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_letters(client, "order 7 is broken", "order 8 is broken")
    more = "and this one has more: repeat this for the rest"
    for name in ("letters", "dead_letter_groups"):
        where = "services.console.views" if name == "letters" else "admin"
        monkeypatch.setattr(f"millstream.{where}.{name}.MOST_LETTERS", 2)
    last_id = client.execute("XREVRANGE", KEYS.dead_letters, "+", "-", "COUNT", 1)[0][0].decode()
    one = browser.send(browser.get(f"/letter?handler=shop.pay&stream=orders&id={last_id}"), "/letters/redrive")
    assert "1 dead letter would be redriven" in one.text
    page = browser.get(LETTERS)
    assert "These are the first 2, and there are more" in page.text
    question = browser.send(page, "/letters/redrive")
    assert f"{more}, or use the command, which takes all without --limit." in question.text
    assert "millstream dlq redrive shop.pay --limit 2" in question.text
    done = browser.send(question, "/letters/redrive")
    assert "2 dead letters redriven." in done.text
    assert more in done.text
    rest = browser.send(browser.get(LETTERS), "/letters/purge")
    assert ("1 dead letter would be deleted" in rest.text, more in rest.text) == (True, False)
    assert more not in browser.send(rest, "/letters/purge", confirm="1").text
    assert errors_left(client) == []


def test_a_group_whose_errors_are_hidden_is_opened_redriven_and_exported_without_naming_its_error(
    client: Client,
) -> None:
    fill_with(client, "x")
    add_letters(client, "order 7 is broken", "order 8 is broken")

    def redact(name: str, text: str) -> str:
        return "(hidden)" if name == "error" else text

    with authorized(client.url, Level.ADMIN, redact=redact) as browser:
        page = browser.get(LETTERS)
        links = [one for one in page.links if "sample=" in one]
        assert len(links) == 2
        group = browser.get(links[0])
        assert "2 failed: (hidden)" in group.text
        guess = browser.get(f"{LETTERS}&reason=failed&error=order+N+is+broken")
        assert guess.status == 404, "no guess is confirmed"
        exported = browser.send(group, "/letters/export")
        assert len(exported.html.splitlines()) == 2
        question = browser.send(group, "/letters/redrive")
        assert "2 dead letters would be redriven: 2 of orders." in question.text
        back = browser.get(next(one for one in question.links if "sample=" in one))
        assert "2 failed: (hidden)" in back.text
        done = browser.send(question, "/letters/redrive")
        assert "2 dead letters redriven." in done.text
        for one in (page, group, question, done, browser.get("/audit")):
            assert "broken" not in one.html
        assert browser.get(links[0]).status == 404, "its sample is gone"
    assert errors_left(client) == ["ValueError: x"]


def test_a_selection_of_dead_letters_is_redriven_and_the_rest_stays(browser: Browser, client: Client) -> None:
    _, wanted = add_letters(client, "order 7 is broken", "order 8 is broken")
    group = browser.get(next(one for one in browser.get(LETTERS).links if "order+N" in one))
    assert "no dead letter is selected" in browser.send(group, "/letters/redrive", only="selected").text
    question = browser.send(group, "/letters/redrive", only="selected", letter=f"{wanted} orders")
    assert "1 dead letter redriven." in browser.send(question, "/letters/redrive").text
    assert errors_left(client) == ["ValueError: x", "order 7 is broken"]


def test_one_dead_letter_is_redriven_from_its_own_page(browser: Browser, client: Client) -> None:
    _, wanted = add_letters(client, "order 7 is broken", "order 8 is broken")
    group = browser.get(next(one for one in browser.get(LETTERS).links if "order+N" in one))
    letter = browser.get(next(one for one in group.links if wanted in one))
    question = browser.send(letter, "/letters/redrive")
    assert "1 dead letter would be redriven: 1 of orders." in question.text
    assert "1 dead letter redriven." in browser.send(question, "/letters/redrive").text
    assert errors_left(client) == ["ValueError: x", "order 7 is broken"]


def test_a_button_for_all_of_a_group_means_all_whatever_is_ticked(browser: Browser, client: Client) -> None:
    ticked, _ = add_letters(client, "order 7 is broken", "order 8 is broken")
    group = browser.get(next(one for one in browser.get(LETTERS).links if "order+N" in one))
    question = browser.send(group, "/letters/redrive", letter=f"{ticked} orders")
    assert "2 dead letters would be redriven" in question.text
    assert "2 dead letters redriven." in browser.send(question, "/letters/redrive").text


def test_dead_letters_are_purged_only_if_their_number_is_typed(browser: Browser, client: Client) -> None:
    add_letters(client, "order 7 is broken")
    question = browser.send(browser.get(LETTERS), "/letters/purge")
    assert "Type the number 2 to confirm" in question.text
    again = browser.send(question, "/letters/purge", confirm="3")
    assert "These are not the dead letters, or not the number, that was confirmed." in again.text
    add_letters(client, "one more")
    again = browser.send(again, "/letters/purge", confirm="2")
    assert "Type the number 3" in again.text
    assert len(errors_left(client)) == 3
    gone = client.execute("XRANGE", KEYS.dead_letters, "-", "+", "COUNT", 1)[0][0]
    client.execute("XDEL", KEYS.dead_letters, gone)
    add_letters(client, "another")
    again = browser.send(again, "/letters/purge", confirm="3")
    assert "These are not the dead letters" in again.text, "as many, but others"
    assert "3 dead letters purged." in browser.send(again, "/letters/purge", confirm="3").text
    assert errors_left(client) == []
    assert (last(client).action, last(client).result) == ("dlq purge", "3 of 3 purged")


def run_command_of(question: Page, client: Client) -> None:
    """Run the command that a question shows, as a shell would run it."""
    (shown,) = re.findall(r"The command: <code>(.*?)</code>", question.html)
    for one in unescape(shown).split(" && "):
        _, *words = shlex.split(one)
        assert call(*words[:2], "--yes", *words[2:], url=client.url).code == 0


@pytest.mark.parametrize("verb", ["redrive", "purge"])
def test_the_command_of_a_question_does_what_its_button_does_and_no_more(
    browser: Browser, client: Client, verb: str
) -> None:
    ticked, _ = add_letters(client, "order 7 is broken", "order 8 is broken")
    elsewhere = "other orders"
    joined_by_field(client, elsewhere, app="shop", handler="pay")
    add_letters(client, "order 9 is broken", stream=elsewhere)
    group = browser.get(next(one for one in browser.get(LETTERS).links if "order+N" in one))
    form = group.form("/letters/redrive")
    one_ticked = {**form, "only": "selected", "letter": f"{ticked} orders"}
    run_command_of(browser.post(f"/letters/{verb}", **one_ticked), client)
    assert errors_left(client) == ["ValueError: x", "order 8 is broken", "order 9 is broken"]
    run_command_of(browser.post(f"/letters/{verb}", **form), client)
    assert errors_left(client) == ["ValueError: x"], "of this group, on both streams"
    add_letters(client, *(f"order {n} is broken" for n in range(30)))
    assert "The command" not in browser.post(f"/letters/{verb}", **form).text, "too many to name"
    run_command_of(browser.send(browser.get(LETTERS), f"/letters/{verb}"), client)
    assert errors_left(client) == []


def test_the_command_of_a_question_about_a_key_names_the_key_as_a_shell_reads_it(
    browser: Browser, client: Client
) -> None:
    run_command_of(browser.send(browser.get(PARKED), "/key/skip"), client)
    (queue,) = read_queues(client, KEYS, [queue_of_key(b"parked x", b"")])
    assert queue.length == 2
    run_command_of(browser.send(browser.get(PARKED), "/key/reset"), client)
    assert client.execute("HLEN", KEYS.state) == 0


def test_a_dead_letter_is_shown_in_full(browser: Browser) -> None:
    link = next(one for one in browser.get(LETTERS).links if one.startswith("/letter?"))
    page = browser.get(link)
    for shown in ("ValueError: x", "Traceback", "text x", "key parked x", "millstream dlq show shop.pay"):
        assert shown in page.text, shown


def test_every_delayed_message_is_reached_page_by_page_and_one_of_the_last_page_is_cancelled(
    browser: Browser, client: Client
) -> None:
    with Producer(client.url) as producer:
        for n in range(210):
            producer.publish("later", {"n": n}, delay_ms=3_600_000)
    seen: list[str] = []
    path: str | None = "/delayed?stream=later"
    while path:
        page = browser.get(path)
        seen += re.findall(r'<section data-key="([^"]+)">', page.html)
        path = next((one for one in page.links if "after=" in one and "refresh" not in one), None)
    assert seen == [one.id for one in DelayedMessages(client).find("later", limit=1_000)]
    assert len(seen) == 210
    assert "210 messages wait. These are due later than those before: the first ones." in page.text
    question = browser.send(page, "/delayed/cancel")
    assert "after=" in next(one for one in question.links if one.startswith("/delayed?stream=later"))
    page = browser.send(question, "/delayed/cancel")
    assert "The message is cancelled." in page.text
    assert re.findall(r'<section data-key="([^"]+)">', page.html) == seen[201:]
    assert browser.get("/delayed?stream=later&after=nonsense").status == 400


def test_a_delayed_message_is_cancelled_once_that_is_confirmed(browser: Browser, client: Client) -> None:
    page = browser.get("/delayed?stream=orders")
    assert "text x" in page.text
    question = browser.send(page, "/delayed/cancel")
    assert "1 message waits." in browser.get("/delayed?stream=orders").text
    assert "The message is cancelled." in browser.send(question, "/delayed/cancel").text
    assert "moved or cancelled before" in browser.send(question, "/delayed/cancel").text
    assert call("delayed", "list", "orders", "--json", url=client.url).out == ""


def test_what_the_console_cannot_do_is_one_sentence_and_recorded(browser: Browser, client: Client) -> None:
    fields = browser.get(PARKED).form("/key/unpark")
    page = browser.post("/key/unpark", **{**fields, "handler": "shop.nope"})
    assert (page.status, "no handler 'shop.nope' has run" in page.text) == (404, True)
    assert browser.post("/key/unpark", form_token=fields["form_token"]).status == 400
    client.execute("DEL", KEYS.meta)
    page = browser.post("/key/unpark", **fields)
    assert (page.status, "has not begun on orders" in page.text) == (400, True)
    assert str(last(client).result).startswith("failed: shop.pay has not begun on orders")


def test_an_action_whose_reply_is_lost_is_not_recorded_as_failed(
    browser: Browser, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_the_reply(*_: Any, **__: Any) -> bool:
        raise Unavailable("the reply did not arrive", unreachable=True)

    def unpark_and_lose_the_reply(*args: Any) -> bool:
        unpark(*args)
        return lose_the_reply()

    monkeypatch.setattr(keys, "unpark_queue", unpark_and_lose_the_reply)
    page = browser.send(browser.get(PARKED), "/key/unpark")
    assert (page.status, "may have been done: see its page and the audit" in page.text) == (503, True)
    assert count_parked(client, [KEYS])[0] == 0
    assert last(client).result == "unknown, it may have been done: the reply did not arrive"
    monkeypatch.setattr(keys, "read_key", lose_the_reply)
    page = browser.get(PARKED)
    assert (page.status, "may have been done" in page.text) == (503, False), "this was no action"


# --- The audit stream ---


def test_an_action_that_did_not_end_is_recorded_without_a_result(client: Client) -> None:
    with AuditLog(client).action(by="ann", action="pause", about={"handler": "shop.pay"}) as running:
        (record,) = AuditLog(client).read()
        assert (record.by, record.action, record.about, record.result) == (
            "ann",
            "pause",
            {"handler": "shop.pay"},
            None,
        )
        running.result = "paused"
    assert AuditLog(client).read()[0].result == "paused"
    with pytest.raises(MillstreamError, match="no"), AuditLog(client).action(by="ann", action="skip", about={}):
        raise MillstreamError("no")
    assert [one.result for one in AuditLog(client).read()] == ["failed: no", "paused"]


def test_the_audit_is_read_page_by_page_whatever_is_written_there(client: Client) -> None:
    log = AuditLog(client)
    for n in range(250):
        with log.action(by="ann", action=f"a{n}", about={}):
            pass
    client.execute("XADD", audit_key(), "*", "by", b"\xff", "about", b"no JSON")
    first = log.read(count=100)
    assert (first[0].about, first[0].result) == ({}, None)
    rest, more = log.read_page(count=1_000, before=first[-1].id)
    assert more is None
    assert [one.action for one in [*first[1:], *rest]] == [f"a{n}" for n in reversed(range(250))]
    assert {one.result for one in rest} == {"done"}


def test_a_worker_is_drained_once_its_name_is_typed(browser: Browser, client: Client) -> None:
    question = browser.send(browser.get("/workers"), "/workers/drain")
    assert "Type the name w-0 to confirm" in question.text
    assert "This is not its name." in browser.send(question, "/workers/drain", confirm="w-1").text
    assert find_worker(client, "w-0", "shop").drained_since_ms is None
    page = browser.send(question, "/workers/drain", confirm="w-0")
    assert "The drain is requested" in page.text
    assert find_worker(client, "w-0", "shop").drained_since_ms is not None
    record = last(client)
    assert (record.action, record.result) == ("drain", "requested")
    assert record.about == {"app": "shop", "worker": "w-0"}
    assert "/workers/drain" not in page.actions
    assert "The drain was requested before" in browser.send(question, "/workers/drain", confirm="w-0").text
