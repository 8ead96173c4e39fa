"""Apps of the workers' fault tests: each run is recorded, and each message says how it treats its worker.

Fields of a message: `n`, its number; `ms`, how long it takes; `do`, what it does then (see `misbehave`).
"""

import asyncio
import ctypes
import functools
import os
import re
import time
import uuid
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from millstream import After, App, Cancel, Limit, Message, Retry, State
from millstream.delivery import KeyedStream
from millstream.delivery.permits import Permits
from millstream.handlers.limits import Share
from millstream.handlers.schedule import Missed
from millstream.model import value_of
from millstream.redis_client.client import Client
from millstream.redis_client.pipelining import server_time_us
from millstream.testing.history import Event, Kind, Recorder

GATE = "gate"
"""A file in the folder of the test: messages with `do="wait"` wait until it exists."""

PACE = Limit(per="tenant", rate="100/s", cost="cost")
"""The limit of the app `paced`."""

STATE_TTL_MS = 300
"""How long states of the app `expiring` last."""

BATCH_STATE_TTL_MS = 3_000
"""How long those of the app `lasting` do: over more than one batch on Spark."""

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
paced = App("paced")
expiring = App("expiring")
lasting = App("lasting")
scheduled = App("scheduled")


@functools.cache
def recorder(name: str) -> Recorder:
    """The log of this name."""
    return Recorder(folder() / name)


def folder() -> Path:
    """The folder of the test."""
    return Path(os.environ["MILLSTREAM_TEST_FOLDER"])


def note(kind: Kind, message: Message) -> None:
    """Write one event of a run."""
    worker, attempt = str(os.getpid()), str(message.attempt)
    recorder(f"events.{worker}").record(
        Event(
            kind=kind,
            stream=message.stream,
            id=message.id,
            key=message.key,
            handler="work",
            worker=worker,
            limited=message.fields.get("tenant", b"").decode(),
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

    The message of a timer has the field `of`: the id of the message that has set it. The output of a message has the
    changes of timers, each as name=delay in milliseconds; without a delay the timer is canceled.
    """
    output = work_keyed(message, state)
    if "of" in message.fields:
        return [{**output, "of": message.fields["of"]}]
    state["set"] = number = state.get("set", 0) + 1
    soon = timedelta(milliseconds=50 * (1 + number % 7))
    changes: list[After | Cancel]
    match number % 4:
        case 1:
            changes = [Cancel(name="canceled"), After(soon, {"of": message.id}, name=f"own-{number}")]
        case 2:
            changes = [After("1h", {"of": message.id}, name=f"replaced-{number}")]
        case 3:
            changes = [After(soon, {"of": message.id}, name=f"replaced-{number - 1}")]
        case _:
            changes = [After("1h", {"of": message.id}, name="canceled")]
    shown = [f"{one.name}={one.delay_ms if isinstance(one, After) else ''}" for one in changes]
    return [changes[0], {**output, "timers": " ".join(shown)}, *changes[1:]]


def work_stream(message: Message, state: State) -> dict[str, Any]:
    """The same for a handler with order="stream"; also returns the stream and the token of its lease."""
    return {**work_keyed(message, state), "stream": message.stream, "fence": message.fence}


def record_permit(client: Client, stream: str, entry_id: str, share: Share, *, cost: float, asked_us: int) -> None:
    """Record a permit that was asked for at a time of the server and has just been taken, in the file of this process."""
    recorder(f"permits.{os.getpid()}").record(
        Event(
            kind="started",
            stream=stream,
            id=entry_id,
            handler="work",
            worker=str(os.getpid()),
            at=server_time_us(client) / 1000,
            limited=share.value.decode(),
            cost=cost,
            asked=asked_us / 1000,
        )
    )


def record_permits() -> None:
    """Record each permit of the app `paced` in a file of its process, with the times of the server before and after it."""
    keyed_stream: Any = KeyedStream
    real_exchange_permits = KeyedStream.exchange_permits

    def exchange_permits(stream: KeyedStream, permits: Permits, returned: Any, asked: Any) -> list[float]:
        if permits.limit != PACE:
            return real_exchange_permits(stream, permits, returned, asked)
        asked_us = server_time_us(stream._client)
        waits = real_exchange_permits(stream, permits, returned, asked)
        for (delivery, share), wait_ms in zip(asked, waits, strict=True):
            if wait_ms == 0:
                cost = float(value_of(delivery.pairs, b"cost") or 0)
                record_permit(stream._client, stream.stream, delivery.id.decode(), share, cost=cost, asked_us=asked_us)
        return waits

    keyed_stream.exchange_permits = exchange_permits


def name_and_record_permits_of_tasks() -> None:
    """Let the name of each permit of a task begin with the number of its process: a test returns those of the dead.

    Record those of the app `paced`, as in workers.
    """
    from millstream.spark.engine import task_permits

    module: Any = task_permits
    real_take = task_permits.TaskPermits.take

    def take(permits: task_permits.TaskPermits, run: Any, message: Message) -> Any:
        if permits._permits.limit != PACE:
            return real_take(permits, run, message)
        client = permits._commit_store._client
        asked_us = server_time_us(client)
        answer = real_take(permits, run, message)
        if isinstance(answer, task_permits.TaskPermit):
            cost = float(message.fields["cost"])
            record_permit(client, run.stream, message.id, answer.share, cost=cost, asked_us=asked_us)
        return answer

    module.TaskPermits.take = take
    module.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{os.getpid()}-{uuid.uuid4().hex}"))


if "MILLSTREAM_TEST_ARM" in os.environ:  # a driver, or one of its tasks
    name_and_record_permits_of_tasks()
else:
    record_permits()
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
paced.handler("in", name="work", into="out", key="key", limit=PACE, retry=Retry(attempts=6, delay_ms=20))(work_keyed)
for one, ttl_ms in ((expiring, STATE_TTL_MS), (lasting, BATCH_STATE_TTL_MS)):
    one.handler("in", name="work", into="out", key="key", state_ttl_ms=ttl_ms, retry=Retry(attempts=6, delay_ms=20))(
        work_keyed
    )
coroutine.handler("in", name="work", into="out", retry=SHORT)(work_async)
streamed.handler(pattern="call:*", name="work", into="out", order="stream", retry=Retry(attempts=6, delay_ms=20))(
    work_stream
)
scheduled.handler("in", name="work", into="out", retry=SHORT)(work)
scheduled.handler("rest", name="rest", into="out", retry=SHORT)(work)
for policy in get_args(Missed):
    scheduled.every("1s", stream=f"ticks:{policy}", name=policy, missed=policy)(lambda: {"pid": os.getpid()})
