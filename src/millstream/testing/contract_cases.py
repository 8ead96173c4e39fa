"""The cases of the handler contract: handlers, their input entries, and the required results.

Handlers are functions of this module, so that every process of an engine can import them. `CASES` has all cases.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from millstream.errors import Reject
from millstream.model import Message, Retry, State
from millstream.testing.contract import Case, Letter, Pairs, entry, entry_id, redriven
from millstream.testing.contract_keys import KEYED_CASES
from millstream.testing.contract_waits import WAITING_CASES

Output = dict[str, object]

# --- Outputs ---


def outputs(message: Message) -> Any:
    """Return the number of outputs that the message asks for, in the form that it asks for."""
    parts = [{"n": message.text("n"), "part": part} for part in range(int(message.fields["parts"]))]
    match message.text("form"):
        case "none":
            return None
        case "one":
            return parts[0]
        case "iterator":
            return iter(parts)
        case "tuple":
            return tuple(parts)
    return parts


async def outputs_async(message: Message) -> Any:
    """As `outputs`."""
    await asyncio.sleep(0)
    return outputs(message)


_FORMS = (("none", 1), ("one", 1), ("list", 0), ("list", 3), ("tuple", 2), ("iterator", 40))
_OUTPUTS: dict[str, Any] = {
    "entries": [entry(n=n, form=form, parts=parts) for n, (form, parts) in enumerate(_FORMS)],
    "outputs": [
        {"n": n, "part": part} for n, (form, parts) in enumerate(_FORMS) if form != "none" for part in range(parts)
    ],
    "order_by": "n",
}


def trimmed(message: Message) -> Output:
    """Return one output for each message, for a stream that is trimmed."""
    return {"n": message.text("n")}


def without_into(message: Message) -> Output | None:
    """Return an output although the handler has no output stream."""
    return {"n": 1} if message.text("n") == "1" else None


# --- Retries ---

_FIRST_DELAY_MS = 40.0
_failed_at_s: dict[tuple[str, str], float] = {}


def retries(message: Message) -> Output:
    """Fail as often as the message asks for; output whether the back-off since the last failure was kept."""
    now_s, entry_ref = time.monotonic(), (message.stream, message.id)
    if message.attempt <= int(message.fields["fails"]):
        _failed_at_s[entry_ref] = now_s
        raise RuntimeError("not yet")
    min_backoff_s = _FIRST_DELAY_MS / 1000 * 2 ** (message.attempt - 2)
    waited = message.attempt == 1 or now_s - _failed_at_s.get(entry_ref, now_s) >= 0.9 * min_backoff_s
    return {"n": message.text("n"), "attempt": message.attempt, "waited": waited}


async def retries_async(message: Message) -> Output:
    """As `retries`."""
    await asyncio.sleep(0)
    return retries(message)


_FAILS = (0, 1, 2, 3, 9, 0)
_RETRIES: dict[str, Any] = {
    "options": {"retry": Retry(attempts=4, delay_ms=_FIRST_DELAY_MS, factor=2, jitter=0)},
    "entries": [entry(n=n, fails=fails) for n, fails in enumerate(_FAILS)],
    "outputs": [{"n": n, "attempt": fails + 1, "waited": "true"} for n, fails in enumerate(_FAILS) if fails < 4],
    "letters": [Letter(entry=4, reason="failed", attempts=4, says="RuntimeError: not yet")],
}

# --- Dead letters ---


def dead_letters(message: Message) -> Output | None:
    """End as the message asks for."""
    match message.text("end"):
        case "fail":
            raise LookupError("unknown customer")
        case "exit":
            sys.exit(3)
        case "reject":
            raise Reject("not this one")
        case "object":
            return {"thing": object()}
        case "nothing":
            return {}
    return {"end": message.text("end")}


async def dead_letters_async(message: Message) -> Output | None:
    """As `dead_letters`."""
    await asyncio.sleep(0)
    return dead_letters(message)


_DEAD: dict[str, Any] = {
    "options": {"retry": Retry(attempts=2, delay_ms=1)},
    "entries": [
        entry(end="fail", bytes=b"\x00\xff\r\n"),
        entry(end="exit"),
        entry(end="reject"),
        entry(end="object"),
        entry(end="nothing"),
        entry(end="well"),
    ],
    "outputs": [{"end": "well"}],
    "letters": [
        Letter(entry=0, reason="failed", attempts=2, says="LookupError: unknown customer"),
        Letter(entry=1, reason="failed", attempts=2, says="SystemExit: 3"),
        Letter(entry=2, reason="rejected", says="not this one"),
        Letter(entry=3, reason="bad-output", says="'thing' cannot be written"),
        Letter(entry=4, reason="bad-output", says="no field to write"),
    ],
}


def crashed(message: Message) -> Output:
    """Kill its own process, if the message is a poison pill."""
    if message.text("poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": message.text("n"), "attempt": message.attempt}


def redriven_entries(message: Message) -> Output:
    """Output the fields that the handler sees."""
    if message.text("n") == "9":
        raise Reject("again")
    return {"n": message.text("n"), "fields": ",".join(message.fields)}


# --- Lists ---


def lists(messages: list[Message]) -> list[Output]:
    """Return the numbers of a list, but reject a list with a 13 in it."""
    if any(message.text("n") == "13" for message in messages):
        raise Reject("unlucky")
    return [{"n": message.text("n")} for message in messages]


async def lists_async(messages: list[Message]) -> list[Output]:
    """As `lists`."""
    await asyncio.sleep(0)
    return lists(messages)


_LISTS: dict[str, Any] = {
    "options": {"retry": Retry(attempts=2, delay_ms=1), "batch_size": 5, "rate": 500},
    "entries": [entry(n=n) for n in range(20)],
    "outputs": [{"n": n} for n in range(20) if n != 13],
    "letters": [Letter(entry=13, reason="rejected", attempts=2, says="unlucky")],
}


# --- Arguments of a handler ---


@dataclass
class AsDataclass:
    """A message, as a dataclass."""

    n: int
    tags: list[str]
    note: str | None = None


class AsStruct(msgspec.Struct):
    """A message, as a msgspec Struct."""

    n: int
    tags: list[str]
    note: str | None = None


class AsTypedDict(TypedDict):
    """A message, as a TypedDict."""

    n: int
    tags: list[str]
    note: str | None


def dataclass_model(model: AsDataclass) -> Output:
    """Output the decoded values."""
    return {"next": model.n + 1, "tags": len(model.tags), "note": repr(model.note)}


def struct_model(model: AsStruct, message: Message) -> Output:
    """Output the decoded values; the handler also takes the Message."""
    return {"next": model.n + 1, "tags": len(model.tags), "note": repr(model.note) if message.id else "?"}


def typed_dict_model(model: AsTypedDict) -> Output:
    """Output the decoded values."""
    return {"next": model["n"] + 1, "tags": len(model["tags"]), "note": repr(model["note"])}


def model_case(name: str, promise: str, function: Any) -> Case:
    """Return the case of a model with the fields of `AsDataclass`; `function` is like `dataclass_model`."""
    return Case(
        name=name,
        promise=promise,
        function=function,
        options={"retry": Retry(attempts=3, delay_ms=1)},
        entries=[
            entry(n=41, tags='["a", "b"]', note="é", other="ignored"),
            entry(n=1, tags="[]"),
            entry(n="one", tags="[]"),
            entry(tags="[]"),
            entry(n=1, tags="[1"),
            entry(n=1, tags="[]", note=b"\xff"),
        ],
        outputs=[{"next": 42, "tags": 2, "note": "'é'"}, {"next": 2, "tags": 0, "note": "None"}],
        letters=[
            Letter(entry=2, reason="undecodable", says="n"),
            Letter(entry=3, reason="undecodable", says="n"),
            Letter(entry=4, reason="undecodable", says="tags"),
            Letter(entry=5, reason="undecodable", says="note"),
        ],
    )


def message_access(message: Message) -> Output:
    """Output everything that a handler can read from its message."""
    return {
        "stream": message.stream,
        "id": message.id,
        "pairs": b"|".join(message.pairs),
        "fields": ascii(message.fields),
        "text": message.text("v", "-"),
        "attempt": message.attempt,
        "key": repr(message.key),
        "fenced": message.fence > 0,
    }


_RAW: Sequence[Pairs] = (
    [b"v", b"\x00\xff", b"v", "last é".encode()],
    [b"\xff", b"", b"", b"\r\n"],
    [b"v", b"\x80"],
)
_RAW_FIELDS = ({"v": "last é".encode()}, {"\udcff": b"", "": b"\r\n"}, {"v": b"\x80"})
_RAW_TEXTS = ("last é", "-", "\ufffd")

# --- Time limits, restart ---


def time_limit(message: Message) -> Output:
    """Sleep beyond the time limit, if the message asks for it."""
    if message.text("slow"):
        time.sleep(60)
    return {"n": message.text("n")}


async def time_limit_async(message: Message) -> Output:
    """As `time_limit`."""
    if message.text("slow"):
        await asyncio.sleep(60)
    return {"n": message.text("n")}


_LIMITS: dict[str, Any] = {
    "options": {"retry": Retry(attempts=2, delay_ms=1), "time_limit_ms": 1_500},
    "entries": [entry(n=n, **({"slow": "yes"} if n == 1 else {})) for n in range(6)],
    "outputs": [{"n": n} for n in range(6) if n != 1],
    "letters": [Letter(entry=1, reason="failed", attempts=2, says="time limit of 1,500 ms")],
}


def restart(message: Message) -> Output:
    """Take a moment; fail on the first attempt of every tenth message."""
    time.sleep(0.01)
    if message.attempt == 1 and message.fields["n"].endswith(b"0"):
        raise RuntimeError("not yet")
    return {"n": message.text("n")}


# --- Versions ---


class Priced(TypedDict):
    """A message in version 3: amount and currency."""

    key: str
    amount: str
    currency: str
    schema_version: int


def with_currency(fields: dict[str, bytes]) -> dict[str, object]:
    """Upcast version 1, which had no currency."""
    return {**fields, "currency": "EUR"}


def amount_of_cents(fields: dict[str, bytes]) -> dict[str, object]:
    """Upcast version 2, which had cents."""
    cents = int(fields.pop("cents"))
    return {**fields, "amount": f"{cents / 100:.2f}"}


def seen_as_messages(state: dict[str, Any]) -> dict[str, Any]:
    """Upcast a state of version 1."""
    return {"messages": state.pop("seen"), **state}


def messages_as_count(state: dict[str, Any]) -> dict[str, Any]:
    """Upcast a state of version 2."""
    return {"count": state.pop("messages"), **state}


def upcast(model: Priced, message: Message, state: State) -> Output:
    """Return the message in the current version, and the number of its key."""
    state["count"] = state.get("count", 0) + 1
    amount = message.text("amount")
    return {**model, "n": message.text("n"), "count": state["count"], "same": str(model["amount"] == amount)}


async def upcast_async(model: Priced, message: Message, state: State) -> Output:
    """As `upcast`."""
    await asyncio.sleep(0)
    return upcast(model, message, state)


_STATES: dict[bytes, tuple[int, dict[str, Any]]] = {
    b"b": (1, {"seen": 10}),
    b"c": (2, {"messages": 20}),
    b"d": (3, {"count": 30}),
}
_UPCAST: dict[str, Any] = {
    "states": _STATES,
    "options": {
        "key": "key",
        "message_upcasts": (with_currency, amount_of_cents),
        "state_upcasts": (seen_as_messages, messages_as_count),
    },
    "entries": [
        entry(key="a", n=0, cents=150),
        entry(key="a", n=1, cents=250, currency="USD", schema_version=2),
        entry(key="a", n=2, amount="3.50", currency="GBP", schema_version=3),
        entry(key="a", n=3, cents="many"),
        entry(key="a", n=4, amount="4.50", currency="GBP", schema_version=4),
        entry(key="a", n=5, cents=550, schema_version="two"),
        entry(key="a", n=6, cents=650, schema_version=1),
        *(entry(key=key, n=n, cents=100) for n in range(2) for key in "bcd"),
    ],
    "outputs": [
        {
            "key": key,
            "amount": amount,
            "currency": currency,
            "schema_version": 3,
            "n": n,
            "count": count,
            "same": "True",
        }
        for key, n, amount, currency, count in (
            ("a", 0, "1.50", "EUR", 1),
            ("a", 1, "2.50", "USD", 2),
            ("a", 2, "3.50", "GBP", 3),
            ("a", 6, "6.50", "EUR", 4),
            *((key, n, "1.00", "EUR", 10 * at + n + 1) for at, key in enumerate("bcd", 1) for n in range(2)),
        )
    ],
    "order_by": "key",
    "letters": [
        Letter(
            entry=3, reason="undecodable", says="message_upcasts[1], from version 2 of the message, raised ValueError"
        ),
        Letter(entry=4, reason="undecodable", says="schema_version 4, and this handler knows versions up to 3"),
        Letter(entry=5, reason="undecodable", says="must be a whole number from 1"),
    ],
}


# --- All cases ---

CASES: tuple[Case, ...] = (
    Case(name="outputs", promise="none, one or many outputs are written, in their order", function=outputs, **_OUTPUTS),
    Case(name="outputs_async", promise="so are the outputs of async handlers", function=outputs_async, **_OUTPUTS),
    Case(
        name="trimmed",
        promise="into_maxlen keeps the output stream to about so many entries",
        function=trimmed,
        options={"into_maxlen": 100},
        entries=[entry(n=n) for n in range(1_000)],
        outputs=[{"n": n} for n in range(1_000)],
        at_most=300,
    ),
    Case(
        name="without_into",
        promise="an output without an output stream makes the message a dead letter, not a silent loss",
        function=without_into,
        options={"into": None},
        entries=[entry(n=0), entry(n=1)],
        letters=[Letter(entry=1, reason="bad-output", says="no into=")],
    ),
    Case(
        name="retries",
        promise="a failing message is retried after its back-off; after its last attempt it is a dead letter",
        function=retries,
        **_RETRIES,
    ),
    Case(name="retries_async", promise="so is a message of an async handler", function=retries_async, **_RETRIES),
    Case(
        name="dead_letters",
        promise="a message that cannot be processed is a dead letter with its reason, its attempts and its bytes",
        function=dead_letters,
        **_DEAD,
    ),
    Case(
        name="dead_letters_async", promise="so is a message of an async handler", function=dead_letters_async, **_DEAD
    ),
    Case(
        name="crashed",
        promise="a message that kills its process in each attempt becomes a dead letter, no other message does",
        function=crashed,
        options={"retry": Retry(attempts=3, delay_ms=1)},
        entries=[entry(n=n, **({"poison": "yes"} if n == 7 else {})) for n in range(20)],
        outputs=[{"n": n, "attempt": 1} for n in range(20) if n != 7],
        letters=[Letter(entry=7, reason="crashed", attempts=3)],
        kills=True,
    ),
    Case(
        name="redriven",
        promise="a redriven entry is run only by the handler that it is meant for, with its original fields",
        function=redriven_entries,
        entries=[
            redriven("contract.redriven", entry(n=1, v="x")),
            redriven("contract.other", entry(n=2)),
            entry(n=3),
            redriven("contract.redriven", entry(n=9)),
        ],
        outputs=[{"n": 1, "fields": "n,v"}, {"n": 3, "fields": "n"}],
        letters=[Letter(entry=3, reason="rejected", says="again", pairs=entry(n=9))],
    ),
    model_case(
        "dataclass_model", "a dataclass is decoded from the fields, or the message is a dead letter", dataclass_model
    ),
    model_case(
        "struct_model", "a msgspec Struct is decoded from the fields, or the message is a dead letter", struct_model
    ),
    model_case(
        "typed_dict_model", "a TypedDict is decoded from the fields, or the message is a dead letter", typed_dict_model
    ),
    Case(
        name="message_access",
        promise="a handler sees its entry as it is, byte for byte, with its stream, id, attempt and fencing token",
        function=message_access,
        entries=_RAW,
        outputs=[
            {
                "stream": "{message_access}.in",
                "id": entry_id(n),
                "pairs": b"|".join(pairs),
                "fields": ascii(_RAW_FIELDS[n]),
                "text": _RAW_TEXTS[n],
                "attempt": 1,
                "key": "None",
                "fenced": "true",
            }
            for n, pairs in enumerate(_RAW)
        ],
    ),
    Case(
        name="lists",
        promise="a handler may take lists, of which only the failing message is dead-lettered, within its rate limit",
        function=lists,
        **_LISTS,
    ),
    Case(name="lists_async", promise="so may an async handler", function=lists_async, **_LISTS),
    Case(
        name="time_limit",
        promise="an attempt that takes longer than the time limit fails, and delays no other message",
        function=time_limit,
        **_LIMITS,
    ),
    Case(
        name="time_limit_async", promise="so does an attempt of an async handler", function=time_limit_async, **_LIMITS
    ),
    Case(
        name="restart",
        promise="a message committed before the engine stopped is not committed again, and no other message is lost",
        function=restart,
        options={"retry": Retry(attempts=2, delay_ms=1)},
        entries=[entry(n=n) for n in range(600)],
        outputs=[{"n": n} for n in range(600)],
        stop_after=50,
    ),
    Case(
        name="upcast",
        promise="a message of an earlier version passes the upcasts before its handler sees it; one that an upcast fails "
        "on, and one of a later version, is a dead letter as it was published; so does a state of an earlier version",
        function=upcast,
        **_UPCAST,
    ),
    Case(name="upcast_async", promise="so does a message of an async handler", function=upcast_async, **_UPCAST),
    *KEYED_CASES,
    *WAITING_CASES,
)
