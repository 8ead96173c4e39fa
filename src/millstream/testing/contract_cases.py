"""The cases of the handler contract: handlers, what they are given, and what must come of it.

Handlers are functions of this module, so that every process of an engine can import them. `CASES` is all of them.
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
from millstream.model import Message, Retry
from millstream.testing.contract import Case, Letter, Pairs, entry, entry_id, redriven
from millstream.testing.contract_keys import KEYED_CASES

Output = dict[str, object]

# --- Outputs ---


def outputs(message: Message) -> Any:
    """Give as many outputs as the message asks for, in the form that it asks for."""
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
    """One output for each message, into a stream that is kept short."""
    return {"n": message.text("n")}


def without_into(message: Message) -> Output | None:
    """Return something although there is nowhere to put it."""
    return {"n": 1} if message.text("n") == "1" else None


# --- Retries ---

_FIRST_DELAY_MS = 40.0
_failed_at: dict[tuple[str, str], float] = {}


def retries(message: Message) -> Output:
    """Fail as often as the message asks for; tell whether the back-off was kept since the last failure."""
    now, place = time.monotonic(), (message.stream, message.id)
    if message.attempt <= int(message.fields["fails"]):
        _failed_at[place] = now
        raise RuntimeError("not yet")
    least_s = _FIRST_DELAY_MS / 1000 * 2 ** (message.attempt - 2)
    waited = message.attempt == 1 or now - _failed_at.get(place, now) >= 0.9 * least_s
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
    """End in the way that the message asks for."""
    match message.text("end"):
        case "fail":
            raise LookupError("nobody knows")
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
        Letter(entry=0, reason="failed", attempts=2, says="LookupError: nobody knows"),
        Letter(entry=1, reason="failed", attempts=2, says="SystemExit: 3"),
        Letter(entry=2, reason="rejected", says="not this one"),
        Letter(entry=3, reason="bad-output", says="'thing' cannot be written"),
        Letter(entry=4, reason="bad-output", says="no field to write"),
    ],
}


def crashed(message: Message) -> Output:
    """Kill the process that runs it, if the message is poisoned."""
    if message.text("poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": message.text("n"), "attempt": message.attempt}


def redriven_entries(message: Message) -> Output:
    """Show which fields it sees."""
    if message.text("n") == "9":
        raise Reject("again")
    return {"n": message.text("n"), "fields": ",".join(message.fields)}


# --- Lists ---


def lists(messages: list[Message]) -> list[Output]:
    """Give back the numbers of a list, but refuse one that has an unlucky one in it."""
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


# --- What a handler is given ---


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
    """Show what was decoded."""
    return {"next": model.n + 1, "tags": len(model.tags), "note": repr(model.note)}


def struct_model(model: AsStruct, message: Message) -> Output:
    """Show what was decoded; the entry itself may be asked for beside it."""
    return {"next": model.n + 1, "tags": len(model.tags), "note": repr(model.note) if message.id else "?"}


def typed_dict_model(model: AsTypedDict) -> Output:
    """Show what was decoded."""
    return {"next": model["n"] + 1, "tags": len(model["tags"]), "note": repr(model["note"])}


def model_case(name: str, promise: str, function: Any) -> Case:
    """The case of a model with the fields of `AsDataclass`, whatever makes it; `function` answers as its handler does."""
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
    """Show all that a handler can know of its message."""
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
        time.sleep(4)
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
    """Take a moment; fail at first on every tenth message."""
    time.sleep(0.01)
    if message.attempt == 1 and message.fields["n"].endswith(b"0"):
        raise RuntimeError("not yet")
    return {"n": message.text("n")}


# --- All of them ---

CASES: tuple[Case, ...] = (
    Case(name="outputs", promise="none, one or many outputs are written, in their order", function=outputs, **_OUTPUTS),
    Case(name="outputs_async", promise="so are those of async handlers", function=outputs_async, **_OUTPUTS),
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
        promise="a result that has nowhere to go is a dead letter, and no loss in silence",
        function=without_into,
        options={"into": None},
        entries=[entry(n=0), entry(n=1)],
        letters=[Letter(entry=1, reason="bad-output", says="no into=")],
    ),
    Case(
        name="retries",
        promise="a failing message is tried again after its back-off, its attempts are counted, and then it is dead",
        function=retries,
        **_RETRIES,
    ),
    Case(name="retries_async", promise="so is one of an async handler", function=retries_async, **_RETRIES),
    Case(
        name="dead_letters",
        promise="what cannot be processed is a dead letter with its reason, its attempts and its bytes",
        function=dead_letters,
        **_DEAD,
    ),
    Case(name="dead_letters_async", promise="also from async handlers", function=dead_letters_async, **_DEAD),
    Case(
        name="crashed",
        promise="a message that kills its process each time is a dead letter in the end, and costs no other message",
        function=crashed,
        options={"retry": Retry(attempts=3, delay_ms=1)},
        entries=[entry(n=n, **({"poison": "yes"} if n == 7 else {})) for n in range(20)],
        outputs=[{"n": n, "attempt": 1} for n in range(20) if n != 7],
        letters=[Letter(entry=7, reason="crashed", attempts=3)],
        kills=True,
    ),
    Case(
        name="redriven",
        promise="a redriven entry is run by the handler that it is meant for, which does not see that it was redriven",
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
    model_case("dataclass_model", "a dataclass is filled from the fields, or the message is dead", dataclass_model),
    model_case("struct_model", "a msgspec Struct is filled from the fields, or the message is dead", struct_model),
    model_case("typed_dict_model", "a TypedDict is filled from the fields, or the message is dead", typed_dict_model),
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
        promise="a handler may take lists, of which only the guilty message dies, at most so many messages a second",
        function=lists,
        **_LISTS,
    ),
    Case(name="lists_async", promise="so may an async handler", function=lists_async, **_LISTS),
    Case(
        name="time_limit",
        promise="an attempt that takes longer than the time limit has failed, and holds up no other message",
        function=time_limit,
        **_LIMITS,
    ),
    Case(name="time_limit_async", promise="so has one of an async handler", function=time_limit_async, **_LIMITS),
    Case(
        name="restart",
        promise="what was committed before the engine was stopped is not committed again, and the rest is not lost",
        function=restart,
        options={"retry": Retry(attempts=2, delay_ms=1)},
        entries=[entry(n=n) for n in range(600)],
        outputs=[{"n": n} for n in range(600)],
        stop_after=50,
    ),
    *KEYED_CASES,
)
