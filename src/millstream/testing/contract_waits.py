"""The cases of the handler contract for what waits: timers, schedules, limits, and states that expire."""

import asyncio
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from millstream.handlers.key_timers import After, Cancel
from millstream.model import EntryId, Limit, Message, Retry, State
from millstream.testing.contract import Case, Letter, entry

Output = dict[str, object]

# --- Timers, schedules ---


def timers(message: Message, state: State) -> list[object]:
    """Set, replace or cancel timers as the message asks for; the message of the first timer sets a second one."""
    state["count"] = state.get("count", 0) + 1
    n = int(message.fields["n"])
    output = {"key": message.text("key"), "n": n, "count": state["count"]}
    following = {"key": message.text("key"), "n": n}
    match message.text("ask"):
        case "set":
            delay = "1h" if n == 0 else timedelta(milliseconds=50)
            return [output, After(delay, {**following, "ask": "again"}, name="first")]
        case "again":
            return [After(timedelta(milliseconds=1), {**following, "n": n + 1}, name="second"), output]
        case "cancel":
            return [After("0s", following, name="none"), Cancel(name="none"), output, Cancel(name="unknown")]
        case "another key":
            return [output, After("0s", {"key": "b", "n": n}, name="first")]
    return [output]


async def timers_async(message: Message, state: State) -> list[object]:
    """As `timers`."""
    await asyncio.sleep(0)
    return timers(message, state)


def timers_of_lists(messages: list[Message], state: State) -> list[object]:
    """As `timers`, on a list of messages of one key."""
    return [one for message in messages for one in timers(message, state)]


_DELAYS_MS = (0, 1_500, 100)  # one is longer than the pauses between looks for timers that are due: too early is seen


def timer_times(message: Message) -> list[object]:
    """Set timers one after another; output whether the message of one came before it was due, and its fields.

    A timer is set after its message was added to the stream, and due `_DELAYS_MS` later.
    """
    n, now_ms = int(message.fields["n"]), EntryId.parse(message.id).ms
    is_early = now_ms < int(message.text("due_ms", "0"))
    output = {"key": message.text("key"), "n": n, "is_early": is_early, "fields": ",".join(message.fields)}
    if n == len(_DELAYS_MS):
        return [output]
    delay_ms = _DELAYS_MS[n]
    following = {"n": n + 1, "due_ms": now_ms + delay_ms}
    return [output, After(timedelta(milliseconds=delay_ms), following, name="next")]


def fired(message: Message) -> Output:
    """Return what the message of a firing has, and whether the entry names the time of the firing."""
    is_firing = "millstream.firing" in message.fields
    return {"key": message.text("key"), "ago": message.text("ago"), "is_firing": is_firing}


def fire(time: datetime) -> Output:
    """Return the message of a firing: how many periods of the schedule have passed since."""
    return {"key": "a", "ago": (datetime.now(UTC) - time) // timedelta(days=366)}


_NO_FIRING = {"key": "a", "ago": "none", "is_firing": "false"}
_FIRINGS: dict[str, Any] = {
    "function": fired,
    "options": {"key": "key"},
    "entries": [entry(key="a", ago="none")],
    "schedule": fire,
    "firings": 3,
    "order_by": "key",
}

_TIMED = ("set", "", "set", "cancel")
_TIMERS: dict[str, Any] = {
    "entries": [entry(key=f"k{key}", n=n, ask=ask) for n, ask in enumerate(_TIMED) for key in range(3)],
    "outputs": [
        {"key": f"k{key}", "n": n, "count": count}
        for key in range(3)
        for n, count in ((0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (3, 6))
    ],
    "order_by": "key",
    "timers": 6,
}

# --- Limits ---


def _file_names(message: Message, tenant: str) -> str:
    """The beginning of the names of the files that the runs of a tenant have."""
    return f"millstream-{message.stream}-{message.text('run')}-{tenant}-"


@contextmanager
def _in_tenant(message: Message, *, at_once: int) -> Iterator[None]:
    """Fail if more messages of its tenant run, in any processes of this machine."""
    folder, name = Path(tempfile.gettempdir()), _file_names(message, message.text("tenant", ""))
    file = folder / f"{name}{message.id}"
    file.touch(exist_ok=False)
    try:
        if len(list(folder.glob(f"{name}*"))) > at_once:
            raise RuntimeError(f"more than {at_once} messages of the tenant run")
        yield
    finally:
        file.unlink()


def _counted(message: Message, state: State) -> Output:
    state["count"] = state.get("count", 0) + 1
    return {"key": message.key or b"", "n": message.text("n"), "count": state["count"]}


def limited(message: Message, state: State) -> Output:
    """Count the messages of a key; fail if another message of its tenant runs."""
    with _in_tenant(message, at_once=1):
        time.sleep(0.002)
        return _counted(message, state)


async def limited_async(message: Message, state: State) -> Output:
    """As `limited`."""
    with _in_tenant(message, at_once=1):
        await asyncio.sleep(0.002)
        return _counted(message, state)


def _may_end(message: Message) -> bool:
    """Give a signal, or take it if it is there, as the message asks for; False while it has to wait for it."""
    signal = Path(tempfile.gettempdir(), _file_names(message, f"signal-{message.text('signal', '')}"))
    match message.text("ask"):
        case "wait":
            if not signal.exists():
                return False
            signal.unlink()
        case "signal":
            signal.touch()
    return True


async def limited_tenants_async(message: Message, state: State) -> Output:
    """Count the messages of a key; one that waits ends when a message of another tenant has run."""
    with _in_tenant(message, at_once=2):
        while not _may_end(message):  # noqa: ASYNC110 - the signal may come from another process
            await asyncio.sleep(0.01)
        return _counted(message, state)


_STEP_MS = 200  # what one message takes of the rate of its tenant
_EXCESS_MS = 100  # of the rate may begin too soon


def limited_rate(message: Message, state: State) -> Output:
    """Output whether a message begins before the rate of its tenant lets it.

    The first message of a key takes nothing of the rate. It ends before the second one asks, so each later one has to
    begin a step of its own after it.
    """
    n, now_ms = int(message.fields["n"]), time.time_ns() // 1_000_000
    due_ms = state.setdefault("began_ms", now_ms) + (n - 1) * _STEP_MS - _EXCESS_MS
    return {"key": message.text("key"), "n": n, "is_early": now_ms < due_ms}


_RUN = uuid.uuid4().hex
_LIMITED: dict[str, Any] = {
    "entries": [
        entry(key=f"{tenant}{key}", n=n, tenant=tenant, cost=10 * key, run=_RUN)
        for n in range(3)
        for tenant in "ab"
        for key in range(3)
    ],
    "outputs": [
        {"key": f"{tenant}{key}", "n": n, "count": n + 1} for n in range(3) for tenant in "ab" for key in range(3)
    ],
    "order_by": "key",
}
_LIMITED_OPTIONS = {"key": "key", "retry": Retry(attempts=1), "limit": Limit(per="tenant", at_once=1)}

_TENANTS = [
    (f"{tenant}{key}", n, tenant, key) for n in range(2) for tenant in "ab" for key in range(4 if tenant == "a" else 2)
]


def _ask_of_tenant(key: int, n: int, tenant: str) -> str:
    """Two messages of tenant a take all of its limit until those of tenant b have run, which are never more than two."""
    return "" if n or key > 1 else {"a": "wait", "b": "signal"}[tenant]


# --- States that expire ---

_TTL_MS = 100


def state_expires(message: Message, state: State) -> list[object]:
    """Count the messages of a key; the next one comes when the state has expired."""
    output, n = _counted(message, state), int(message.fields["n"])
    if n == 2:
        return [output]
    return [output, After(timedelta(milliseconds=2 * _TTL_MS), {"n": n + 1}, name="next")]


async def state_lasts_async(message: Message, state: State) -> list[object]:
    """Set the state, change it with the next message, and leave it as it is with the last one."""
    await asyncio.sleep(0)
    n = int(message.fields["n"])
    if n < 2:
        state["n"] = n
    output = {"key": message.text("key"), "n": n, "state": state.get("n", "none")}
    return [output] if n == 2 else [output, After(timedelta(milliseconds=50), {"n": n + 1}, name="next")]


# --- All of them ---

WAITING_CASES: tuple[Case, ...] = (
    Case(
        name="timers",
        promise="the message of a timer comes to its handler alone, with its key, after what the stream has of the key; a "
        "timer of the same name is replaced, and one that is canceled does not come",
        function=timers,
        options={"key": "key"},
        **_TIMERS,
    ),
    Case(
        name="timers_async",
        promise="so do those of an async handler",
        function=timers_async,
        options={"key": "key"},
        **_TIMERS,
    ),
    Case(
        name="timers_of_lists",
        promise="so do those of lists of messages of one key, also if messages of one list set, replace and cancel them",
        function=timers_of_lists,
        options={"key": "key"},
        **_TIMERS,
    ),
    Case(
        name="timers_of_streams",
        promise="a handler of whole streams has timers of its stream",
        function=timers,
        options={"order": "stream"},
        entries=[entry(n=0, key="all", ask="set"), entry(n=1, key="all", ask="set")],
        outputs=[
            {"key": "all", "n": 0, "count": 1},
            {"key": "all", "n": 1, "count": 2},
            {"key": "all", "n": 1, "count": 3},
            {"key": "all", "n": 2, "count": 4},
        ],
        order_by="key",
        timers=2,
    ),
    Case(
        name="firings",
        promise="each firing that a schedule has missed is published once and in order, and processed as any message",
        outputs=[_NO_FIRING, *({"key": "a", "ago": ago, "is_firing": "true"} for ago in (2, 1, 0))],
        **_FIRINGS,
    ),
    Case(
        name="firings_once",
        promise='with missed="once", of the firings that a schedule has missed the last one is published, once',
        missed="once",
        outputs=[_NO_FIRING, {"key": "a", "ago": 0, "is_firing": "true"}],
        **_FIRINGS,
    ),
    Case(
        name="firings_skip",
        promise='with missed="skip", no firing that a schedule has missed for long is published',
        missed="skip",
        outputs=[_NO_FIRING],
        **_FIRINGS,
    ),
    Case(
        name="limited",
        promise="no more messages of a tenant run at once than its limit allows; one that waits uses up no attempt, and "
        "keeps its place in its key",
        function=limited,
        options=_LIMITED_OPTIONS,
        **_LIMITED,
    ),
    Case(
        name="limited_async",
        promise="so do those of an async handler, which begin within a rate, too",
        function=limited_async,
        options={**_LIMITED_OPTIONS, "limit": Limit(per="tenant", at_once=1, rate="60000/m", cost="cost")},
        **_LIMITED,
    ),
    Case(
        name="limited_rate",
        promise="no more of a tenant begins in a period than its rate and the costs of its messages allow",
        function=limited_rate,
        options={"key": "key", "retry": Retry(attempts=1), "limit": Limit(per="tenant", rate="1000/s", cost="cost")},
        entries=[entry(key=key, n=n, tenant=key, cost=min(n, 1) * _STEP_MS) for n in range(5) for key in "ab"],
        outputs=[{"key": key, "n": n, "is_early": "false"} for key in "ab" for n in range(5)],
        order_by="key",
    ),
    Case(
        name="timers_need_a_key",
        promise="a message whose handler asks for a timer that cannot be set is a dead letter, and has no effect",
        function=timers,
        options={"key": "key", "missing_key": "unordered"},
        entries=[entry(n=0, ask="set"), entry(n=1, key="a", ask="another key")],
        letters=[
            Letter(entry=0, reason="bad-output", says="a timer belongs to a key"),
            Letter(entry=1, reason="bad-output", says="use the same key"),
        ],
    ),
    Case(
        name="timer_times",
        promise="the id of a timer's message has the time at which it was added to the stream, which is never before the "
        "timer is due; it has the fields that the timer was given, and the key",
        function=timer_times,
        options={"key": "key"},
        entries=[entry(key=f"k{key}", n=0) for key in range(3)],
        outputs=[
            {"key": f"k{key}", "n": n, "is_early": "false", "fields": "key,n,due_ms" if n else "key,n"}
            for key in range(3)
            for n in range(len(_DELAYS_MS) + 1)
        ],
        order_by="key",
        timers=3 * len(_DELAYS_MS),
    ),
    Case(
        name="limited_tenants_async",
        promise="a tenant at its limit of several at once holds up no other tenant, and none has more",
        function=limited_tenants_async,
        options={
            "key": "key",
            "retry": Retry(attempts=1),
            "limit": Limit(per="tenant", at_once=2),
            "time_limit_ms": 86_400_000,
        },
        entries=[
            entry(key=key, n=n, tenant=tenant, run=_RUN, signal=number, ask=_ask_of_tenant(number, n, tenant))
            for key, n, tenant, number in _TENANTS
        ],
        outputs=[{"key": key, "n": n, "count": n + 1} for key, n, _, _ in _TENANTS],
        order_by="key",
    ),
    Case(
        name="state_expires",
        promise="the next message of a key whose state has expired begins without one",
        function=state_expires,
        options={"key": "key", "state_ttl_ms": _TTL_MS},
        entries=[entry(key=key, n=0) for key in "ab"],
        outputs=[{"key": key, "n": n, "count": 1} for key in "ab" for n in range(3)],
        order_by="key",
        timers=4,
    ),
    Case(
        name="state_lasts_async",
        promise="a state expires so long after the last commit that changed it, and one that leaves it does not renew it",
        function=state_lasts_async,
        options={"key": "key", "state_ttl_ms": 86_400_000},
        entries=[entry(key=key, n=0) for key in "ab"],
        outputs=[{"key": key, "n": n, "state": min(n, 1)} for key in "ab" for n in range(3)],
        order_by="key",
        timers=4,
        last_changes={b"a": 1, b"b": 1},
    ),
)
