"""Why a key waits, in words, and what mends it: from the figures alone."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from millstream.admin.delayed_streams import DelayedStream
from millstream.admin.key_explanation import KeyReport, explain_key
from millstream.admin.key_queues import KeyQueue
from millstream.admin.limit_waits import LimitWait
from millstream.admin.reports import HandlerReport
from millstream.delivery.last_error import LastError
from millstream.delivery.long_runs import LongRun
from millstream.delivery.pause import Pause
from millstream.handlers.dead_letter import DeadLetter

pytestmark = [pytest.mark.cli]

HANDLER = HandlerReport(
    app="shop",
    handler="pay",
    stream="orders",
    engine="workers",
    keyed=True,
    committed_id="1-0",
    lag=0,
    lag_exact=True,
    oldest_age_ms=None,
    consumers=1,
    workers=("w-0",),
    pending=0,
    in_flight=0,
    oldest_pending_age_ms=None,
    committed=0,
    processed=0,
    written=0,
    dead=0,
    refused=0,
    dead_letters=0,
    parked=0,
    backing_off=0,
    blocked=0,
    paused=False,
)
PARKED = KeyQueue(
    name=b"kann", state="parked", length=3, first_id="7-0", parked_reason="audit", why="parked for 2.0 s: audit"
)
BACKING_OFF = KeyQueue(
    name=b"kann", state="backing off", length=1, first_id="7-0", failed_attempts=2, why="attempt 3 is due in 2.0 s"
)
LEASED = KeyQueue(name=b"kann", state="leased", length=1, first_id="7-0", failed_attempts=1, why="worker w-0 has it")
READY = KeyQueue(name=b"kann", state="ready", length=1, first_id="7-0", why="waits for a free worker")
LETTER = DeadLetter(
    stream="orders",
    id="6-0",
    pairs=[],
    key=b"ann",
    app="shop",
    handler="pay",
    attempts=1,
    reason="rejected",
    error="negative",
    time_ms=1,
)
LONG_RUN = LongRun(
    handler="shop.pay", stream="orders", id="7-0", key="ann", worker="w-0", started_ms=10_000, time_limit_ms=300_000
)
LIMIT = LimitWait(value=b"acme", fields=(b"tenant",), running=4, waiting=12, rate_wait_ms=2_000)
TRY_NOW = (
    "millstream key park shop.pay ann && millstream key unpark shop.pay ann  # to try it now, with all its attempts"
)
START = 'millstream worker FILE.py  # FILE.py: the file with App("shop")'


def report(
    queue: KeyQueue | None = None, *, key: bytes = b"ann", handler: dict[str, Any] | None = None, **others: Any
) -> KeyReport:
    figures: dict[str, Any] = {
        "is_only_stream": True,
        "last": LastError(),
        "long_run": None,
        "limit": None,
        "is_migrating": False,
        "queued": None,
        "delayed": None,
        "dead_letters": (),
        "now_ms": 100_000,
    }
    return KeyReport(
        handler=msgspec.structs.replace(HANDLER, **(handler or {})), key=key, queue=queue, **(figures | others)
    )


@pytest.mark.parametrize(
    ("figures", "sentence", "mend"),
    [
        (report(), "does not wait: none of its messages is queued or in progress.", ()),
        (
            report(PARKED),
            "waits: parked for 2.0 s: audit. 2 messages wait behind its first message 7-0.",
            ("millstream key unpark shop.pay ann",),
        ),
        (
            report(PARKED, last=LastError(error="E: no.", attempts=5)),
            "The last attempt failed with E: no.",
            ("millstream key unpark shop.pay ann", "millstream key skip shop.pay ann  # or give its first message up"),
        ),
        (
            report(replace(PARKED, why="parked for 2.0 s: migrating from {orders.3}"), is_migrating=True),
            "migrating from {orders.3}. It goes on by itself when its messages in the earlier partition are done.",
            (),
        ),
        (
            report(replace(PARKED, length=0, first_id="")),
            "It has no message now; those to come will wait.",
            ("millstream key unpark shop.pay ann",),
        ),
        (
            report(BACKING_OFF, last=LastError(error="E: no.", attempts=5)),
            "The last attempt failed with E: no.",
            (TRY_NOW,),
        ),
        (
            report(replace(BACKING_OFF, failed_attempts=0), limit=LIMIT),
            "for tenant acme: 4 messages of it run, its rate lets the next message begin in 2.0 s, 12 keys wait for it.",
            (),
        ),
        (report(BACKING_OFF, handler={"consumers": 0}), "No worker and no run of shop.pay is alive.", (START,)),
        (
            report(BACKING_OFF, last=LastError(attempts=2, blocks=True)),
            "waits: blocked, as 2 attempts have failed: attempt 3 is due",
            ("millstream key skip shop.pay ann  # or give its first message up", TRY_NOW),
        ),
        (
            report(LEASED, long_run=LONG_RUN),
            "That message has been running for 90.0 s; its time limit ends it after 5 min.",
            ("millstream key skip shop.pay ann  # or give its first message up",),
        ),
        (report(LEASED, last=LastError(attempts=5)), "This is attempt 2 of 5 on its first message.", ()),
        (report(LEASED, last=LastError(attempts=5, blocks=True)), "This is attempt 2 on its first message.", ()),
        (
            report(replace(LEASED, parked_reason="audit")),
            "is in progress: worker w-0 has it.",
            ("millstream key unpark shop.pay ann",),
        ),
        (report(READY), "is ready: waits for a free worker.", ()),
        (report(READY, handler={"consumers": 0}), "No worker and no run of shop.pay is alive.", (START,)),
        (
            report(READY, handler={"consumers": 0, "engine": "spark"}),
            "No worker and no run of shop.pay is alive.",
            ('millstream run FILE.py  # FILE.py: the file with App("shop")',),
        ),
        (
            report(READY, handler={"pause": Pause()}),
            "shop.pay is paused by an operator.",
            ("millstream resume shop.pay",),
        ),
        (
            report(handler={"pause": Pause(by="breaker", count=5, of=5, cause="failed", error="E")}),
            "shop.pay is paused by its breaker: 5 of 5 messages ended as failed (E).",
            ("millstream resume shop.pay  # once the cause is mended",),
        ),
        (
            report(handler={"lag": 7, "pending": 2, "lag_exact": False}),
            "shop.pay has not read at least 5 entries of orders, which may hold messages of it.",
            (),
        ),
        (report(handler={"lag": 5, "consumers": 0}), "No worker and no run of shop.pay is alive.", (START,)),
        (
            report(handler={"lag": 5}, queued=(10, 10)),
            "It reads none of them now: 10 messages are in key queues, of at most 10.",
            ("millstream key list shop.pay  # the keys with most messages",),
        ),
        (
            report(delayed=DelayedStream(stream="orders", count=2, due_ms=160_000)),
            "2 delayed messages are not in orders yet, the first is due in 60.0 s; one may be of this key.",
            ("millstream delayed list orders",),
        ),
        (
            report(dead_letters=(LETTER, LETTER)),
            "2 of its messages are dead letters, the last one as rejected: negative.",
            ("millstream dlq list shop.pay --key ann", "millstream dlq redrive shop.pay --key ann"),
        ),
    ],
)
def test_the_reason_is_said_with_the_commands_that_mend_it(
    figures: KeyReport, sentence: str, mend: tuple[str, ...]
) -> None:
    found = explain_key(figures)
    assert found.text.startswith("Key ann of shop.pay on orders ")
    assert sentence in found.text
    assert found.mend == mend


def test_a_run_that_takes_long_is_said_with_its_time_limit() -> None:
    run = LongRun(
        handler="shop.pay",
        stream="orders",
        id="7-0",
        key="ann",
        worker="w-0",
        started_ms=10_000,
        time_limit_ms=300_000,
    )
    assert (
        "has been running for 90.0 s; its time limit ends it after 5 min."
        in explain_key(report(LEASED, long_run=run)).text
    )


def test_unread_entries_are_no_reason_for_a_key_that_has_messages() -> None:
    found = explain_key(report(BACKING_OFF, handler={"lag": 5}, queued=(10, 10)))
    assert found.text == "Key ann of shop.pay on orders waits: attempt 3 is due in 2.0 s. Its only message is 7-0."
    assert found.mend == (TRY_NOW,)


def test_commands_name_the_stream_where_there_are_several_and_quote_the_key() -> None:
    found = explain_key(report(PARKED, key=b"a b\xff", is_only_stream=False))
    assert found.mend[0] == r"millstream key unpark shop.pay 'a b\xff' --stream orders"
    assert found.text.startswith(r"Key a b\xff of ")
