"""Commands that show what pages of the console show: dead letters by error, the history, outputs of a key, batches on Spark."""

import re
from typing import Any

import msgspec
import pytest

from millstream.admin import figure_history
from millstream.admin.dead_letter_groups import MOST_LETTERS
from millstream.admin.figure_history import STEP_MS, FigureHistory, HandlerSample, Sample
from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.running_code import report_code
from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, history_key
from millstream.redis_client.pipelining import server_time_ms
from tests.support.commandline import call
from tests.support.consoles import fill_with
from tests.support.dead_letters import KEYS, add_dead_letter
from tests.support.running_codes import CODE, CODE_WITH_OUTPUTS

pytestmark = [pytest.mark.cli]

REFUNDS, OTHER = HandlerKeys("shop", "pay", "refunds"), HandlerKeys("shop", "bill", "orders")
FIGURES = HandlerSample(streams=1, added=7, done=4, dead=0, lag=3, oldest_ms=60_000, dead_letters=2, stuck=1)
LATER = HandlerSample(streams=1, added=9, done=None, dead=None, lag=None, oldest_ms=None, dead_letters=2, stuck=0)


def test_dead_letters_are_in_groups_by_handler_reason_and_error_with_their_first_and_last_time(client: Client) -> None:
    first = add_dead_letter(client, [], "ValueError: row 1 of 20\nmore")
    add_dead_letter(client, [], "KeyError: 'n'")
    last = add_dead_letter(client, [], "ValueError: row 20 of 20", REFUNDS)
    add_dead_letter(client, [], "ValueError: row 3 of 20", OTHER)
    client.execute("XADD", OTHER.dead_letters, "*", "n", "1")
    shown = call("dlq", "groups", "--json", url=client.url).json_lines()
    assert [(one["handler"], one["reason"], one["fingerprint"], one["letters"]) for one in shown[1:]] == [
        ("shop.bill", "unreadable", shown[1]["fingerprint"], 1),
        ("shop.pay", "failed", "ValueError: row N of N", 2),
        ("shop.pay", "failed", "KeyError: 'n'", 1),
    ]
    assert (shown[0]["handler"], shown[0]["reason"]) == ("shop.bill", "failed")
    assert (shown[2]["first_ms"], shown[2]["last_ms"]) == (EntryId.parse(first).ms, EntryId.parse(last).ms)
    assert call("dlq", "groups", "shop.pay", "--json", url=client.url).json_lines() == shown[2:]
    assert call("dlq", "groups", "--reason", "unreadable", "--json", url=client.url).json_lines() == [shown[1]]
    head, row, *_ = call("dlq", "groups", "shop.pay", url=client.url).out.splitlines()
    assert head.split() == ["handler", "reason", "error", "letters", "first", "last"]
    assert re.match(r"shop\.pay +failed +ValueError: row N of N +2 ", row)


@pytest.mark.parametrize(
    ("error", "fingerprint"),
    [
        ("field 'n' must be UTF-8 text, not 5", "field 'n' must be UTF-8 text, not N"),
        ("'utf-8' codec can't decode byte 0xFf in position 12", "'utf-8' codec can't decode byte N in position N"),
        ("a date in ISO 8601, not 8601", "a date in ISO 8601, not N"),
        ("gateway refuses 2.5 of 127.0.0.1:6379", "gateway refuses N of N:N"),
        ("UTF-81 row12 base640 v3", "UTF-N rowN baseN vN"),
    ],
)
def test_a_number_of_a_message_is_replaced_whole_and_that_of_a_name_is_not(
    client: Client, error: str, fingerprint: str
) -> None:
    add_dead_letter(client, [], error)
    (shown,) = call("dlq", "groups", "--json", url=client.url).json_lines()
    assert shown["fingerprint"] == fingerprint


def test_groups_say_which_handler_has_too_many_dead_letters_and_that_there_are_none(client: Client) -> None:
    assert call("dlq", "groups", url=client.url).err == "there are no dead letters\n"
    assert call("dlq", "groups", "shop.gone", url=client.url).code == 1
    letter_id = add_dead_letter(client, [])
    entry = client.execute("XRANGE", KEYS.dead_letters, letter_id, letter_id)[0][1]
    client.pipeline([("XADD", KEYS.dead_letters, "*", *entry) for _ in range(MOST_LETTERS)])
    shown = call("dlq", "groups", "--json", url=client.url)
    assert [one["letters"] for one in shown.json_lines()] == [MOST_LETTERS]
    assert shown.err == "shop.pay has more dead letters: the groups have the first 5,000\n"


def test_the_history_is_shown_oldest_first_of_all_handlers_or_of_some(client: Client) -> None:
    assert "there are no such samples" in call("history", url=client.url).err
    now_ms = server_time_ms(client)
    for minutes, figures in ((90, LATER), (20, FIGURES), (10, LATER)):
        by_handler = {"shop.pay": figures, "bank.book": FIGURES}
        FigureHistory(client).add(Sample(at_ms=now_ms - minutes * STEP_MS, handlers=by_handler))
    older, *recent = call("history", "--since", "2h", "--json", url=client.url).json_lines()
    assert call("history", "--json", url=client.url).json_lines() == recent
    assert [one["at_ms"] for one in (older, *recent)] == [now_ms - minutes * STEP_MS for minutes in (90, 20, 10)]
    assert {one["step_ms"] for one in recent} == {STEP_MS}
    assert [one["handlers"]["shop.pay"] for one in recent] == [
        {**msgspec.structs.asdict(figures), "modes": []} for figures in (FIGURES, LATER)
    ]
    assert recent[0]["handlers"].keys() == {"shop.pay", "bank.book"}
    for name in ("shop", "shop.pay"):
        some = call("history", name, "--json", url=client.url).json_lines()
        assert [[*one["handlers"]] for one in some] == [["shop.pay"], ["shop.pay"]]
    head, *rows = call("history", "shop.pay", url=client.url).out.splitlines()
    assert re.split(r"  +", head) == ["when", "handler", "added", "done", "lag", "oldest", "dead letters", "stuck keys"]
    assert [row.split()[2:] for row in rows] == [
        ["7", "4", "3", "60.0", "s", "2", "1"],
        ["9", "?", "?", "-", "2", "0"],
    ]
    assert call("history", "--since", "soon", url=client.url).code == 2


def test_each_sample_of_the_history_is_printed_as_json_before_the_next_one_is_decoded(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_parse = figure_history._parse

    def parse(*args: Any) -> Sample:
        order.append("decoded")
        return real_parse(*args)

    now_ms = server_time_ms(client)
    for minutes in (3, 2, 1):
        FigureHistory(client).add(Sample(at_ms=now_ms - minutes * STEP_MS, handlers={"shop.pay": FIGURES}))
    monkeypatch.setattr(figure_history, "_parse", parse)
    monkeypatch.setattr("millstream.cli.history.print_json", lambda _: order.append("printed"))
    assert call("history", "--json", url=client.url).code == 0
    assert order == ["decoded", "printed"] * 3


def test_the_history_says_that_it_is_partial_and_fails_where_another_program_has_its_key(client: Client) -> None:
    FigureHistory(client).add(Sample(at_ms=server_time_ms(client), is_partial=True))
    assert [one["partial"] for one in call("history", "--json", url=client.url).json_lines()] == [True]
    told = "the history has the first 100 handlers by name, and up to 100 others where entries wait, that are paused,"
    assert told in call("history", url=client.url).err
    client.execute("DEL", history_key())
    client.execute("SET", history_key(), "text")
    assert call("history", url=client.url).code == 1


def test_the_last_outputs_of_a_key_are_shown_newest_first_with_how_far_the_search_went(client: Client) -> None:
    fill_with(client, "x")
    report_code(client, "shop", {"pay": CODE_WITH_OUTPUTS}, held_ms=3_600_000)
    for n in range(12):
        client.execute("XADD", "out", f"{n + 1}-0", "key", "parked x", "n", n)
        client.execute("XADD", "out", f"{n + 1}-1", "key", "other", "n", n)
    shown = call("key", "outputs", "shop.pay", "parked x", "--json", url=client.url)
    assert shown.json_lines() == [
        {"stream": "out", "id": f"{n + 1}-0", "fields": {"key": "parked x", "n": str(n)}} for n in range(11, 1, -1)
    ]
    assert shown.err == "10 found among the last 20 of 24 entries of out\n"
    head, row, *_ = call("key", "outputs", "shop.pay", "parked x", url=client.url).out.splitlines()
    assert (head.split(), row.split()) == (["stream", "id", "fields"], ["out", "12-0", "key=parked", "x", "n=11"])
    client.execute("DEL", "out")
    client.execute("SET", "out", "text")
    assert "out cannot be read: " in call("key", "outputs", "shop.pay", "parked x", url=client.url).err


def test_a_handler_without_outputs_has_that_reason_on_stderr(client: Client) -> None:
    fill_with(client, "x")
    report_code(client, "shop", {"pay": CODE}, held_ms=3_600_000)
    found = call("key", "outputs", "shop.pay", "parked x", "--json", url=client.url)
    assert (found.code, found.out, found.err) == (0, "", "shop.pay has no into=, so it writes no outputs.\n")


def test_top_has_the_last_micro_batch_of_a_handler_that_runs_on_spark_and_of_no_other(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.delivery.query_progress.HELD_MS", 3_600_000)  # the test repeats no report
    fill_with(client, "x")
    top = ("top", "--once", "--interval", "100ms", "--json")
    assert "query" not in call(*top, url=client.url).json()["handlers"][0]
    batch = QueryProgress(batch=4, rows=100, rows_per_s=50.0, took_ms=2_000, began_ms=1, failures=1, last_failure="no")
    report_progress(client, "shop", {"pay": batch, "bill": batch})
    (found,) = call(*top, url=client.url).json()["handlers"]
    assert found["query"] == msgspec.structs.asdict(batch)
