"""Apps of the workers' fault tests: each run is recorded, and each message says how it treats its worker.

Fields of a message: `n`, its number; `ms`, how long it takes; `do`, what it does then (see `misbehave`).
"""

import asyncio
import ctypes
import functools
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

from millstream import After, App, Cancel, Limit, Message, Retry, State
from millstream.handlers.schedule import Missed
from millstream.testing.history import Event, Kind, Recorder

GATE = "gate"
"""A file in the folder of the test: messages with `do="wait"` wait until it exists."""

app = App("steady")
strict = App("strict")
limited = App("limited")
coroutine = App("coroutine")
keyed = App("keyed")
kept = App("kept")
listed = App("listed")
gathered = App("gathered")
streamed = App("streamed")
brittle = App("brittle")
canceling = App("canceling")
timed = App("timed")
tenants = App("tenants")
scheduled = App("scheduled")


@functools.cache
def recorder(pid: int) -> Recorder:
    """The event log of one process."""
    return Recorder(folder() / f"events.{pid}")


def folder() -> Path:
    """The folder of the test."""
    return Path(os.environ["MILLSTREAM_TEST_FOLDER"])


def note(kind: Kind, message: Message) -> None:
    """Write one event of a run."""
    pid = os.getpid()
    worker, attempt = str(pid), str(message.attempt)
    recorder(pid).record(
        Event(
            kind=kind,
            stream=message.stream,
            id=message.id,
            key=message.key,
            handler="work",
            worker=worker,
            note=attempt,
        )
    )


def misbehave(message: Message) -> None:
    """Do what the message asks for."""
    deed = message.fields.get("do", b"").decode()
    if deed.startswith("exit-"):
        os._exit(int(deed.removeprefix("exit-")))
    if deed == "segfault":
        ctypes.string_at(0)
    if deed == "freeze":
        deed = "block" if (computed := folder() / "computed").exists() else "compute"
        computed.touch()  # the next processes of the message need no processor
    if deed == "compute":
        re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and no other thread runs meanwhile
    if deed == "block":
        ctypes.PyDLL(None).sleep(3600)  # the same without computing: PyDLL holds the interpreter
    if deed == "hang":
        time.sleep(3600)
    while deed == "wait" and not (folder() / GATE).exists():
        time.sleep(0.01)
    if deed == "fail":
        raise RuntimeError("as it was told")
    if deed == "stumble" and message.attempt == 1:
        raise RuntimeError("as it was told")


def ended(message: Message) -> dict[str, Any]:
    """Return the output of a run."""
    note("ended", message)
    return {"id": message.id, "attempt": message.attempt, "pid": os.getpid()}


def work(message: Message) -> dict[str, Any]:
    """Run for as long as the message says, and do as it says."""
    note("started", message)
    time.sleep(int(message.fields.get("ms", 0)) / 1000)
    misbehave(message)
    return ended(message)


async def work_async(message: Message) -> dict[str, Any]:
    """The same for an async handler, which a crash or a hang hits with all that it runs at once."""
    note("started", message)
    await asyncio.sleep(int(message.fields.get("ms", 0)) / 1000)
    misbehave(message)
    return ended(message)


def work_keyed(message: Message, state: State) -> dict[str, Any]:
    """The same for a message of a key; counts the messages of the key."""
    state["count"] = state.get("count", 0) + 1
    return {**work(message), "key": message.key or b"", "count": state["count"]}


def work_list(messages: list[Message], state: State) -> list[dict[str, Any]]:
    """The same for a list of messages of a key."""
    return [work_keyed(message, state) for message in messages]


def work_timed(message: Message, state: State) -> list[Any]:
    """The same for a message of a key, whose timers come in turns: set, replaced, replacing, and canceled by the next.

    The message of a timer has the field `of`: the id of the message that has set it, or why it must not come. The output
    of a message whose timer must come has `delay_ms`.
    """
    output = work_keyed(message, state)
    if "of" in message.fields:
        return [{**output, "of": message.fields["of"]}]
    state["set"] = number = state.get("set", 0) + 1
    delay_ms = 50 * (1 + number % 7)
    rings = {"of": message.id}
    match number % 4:
        case 1:
            own = After(timedelta(milliseconds=delay_ms), rings, name=f"own-{number}")
            return [Cancel(name="canceled"), {**output, "delay_ms": delay_ms}, own]
        case 2:
            return [output, After("1h", {"of": "replaced"}, name=f"replaced-{number}")]
        case 3:
            replacing = After(timedelta(milliseconds=delay_ms), rings, name=f"replaced-{number - 1}")
            return [{**output, "delay_ms": delay_ms}, replacing]
    return [output, After("1h", {"of": "canceled"}, name="canceled")]


def work_stream(message: Message, state: State) -> dict[str, Any]:
    """The same for a handler with order="stream"; also returns the stream and the token of its lease."""
    return {**work_keyed(message, state), "stream": message.stream, "fence": message.fence}


SHORT = Retry(attempts=3, delay_ms=20)
app.handler("in", name="work", into="out", retry=Retry(attempts=10, delay_ms=20))(work)
strict.handler("in", name="work", into="out", retry=SHORT)(work)
limited.handler("in", name="work", into="out", retry=SHORT, time_limit_ms=1_500)(work)
keyed.handler("in", name="work", into="out", key="key", retry=Retry(attempts=6, delay_ms=20))(work_keyed)
kept.handler(
    "in",
    name="work",
    into="out",
    key="key",
    retry=Retry(attempts=6, delay_ms=20),
    state_ttl_ms=3_600_000,
    state_upcasts=[lambda state: {"count": state["seen"]}],
)(work_keyed)
listed.handler("in", name="work", into="out", key="key", retry=Retry(attempts=6, delay_ms=20), batch_size=20)(work_list)
gathered.handler(
    "in",
    name="work",
    into="out",
    key="key",
    retry=Retry(attempts=6, delay_ms=20),
    batch_size=20,
    batch_wait_ms=300,
)(work_list)
brittle.handler("in", name="work", into="out", key="key", retry=SHORT)(work_keyed)
canceling.handler(
    "in", name="work", into="out", key="key", retry=Retry(attempts=2, delay_ms=20, then="cancel"), breaker=None
)(work_keyed)
timed.handler("in", name="work", into="out", key="key", retry=Retry(attempts=6, delay_ms=20))(work_timed)
tenants.handler(
    "in", name="work", into="out", key="key", limit=Limit(per="tenant", at_once=2), retry=Retry(attempts=6, delay_ms=20)
)(work_keyed)
coroutine.handler("in", name="work", into="out", retry=SHORT)(work_async)
streamed.handler(pattern="call:*", name="work", into="out", order="stream", retry=Retry(attempts=6, delay_ms=20))(
    work_stream
)
scheduled.handler("in", name="work", into="out", retry=SHORT)(work)
scheduled.handler("rest", name="rest", into="out", retry=SHORT)(work)
for policy in get_args(Missed):
    scheduled.every("1s", stream=f"ticks:{policy}", name=policy, missed=policy)(lambda: {"pid": os.getpid()})
