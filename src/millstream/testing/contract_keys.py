"""The cases of the handler contract for keys: order, state, back-off, parking and missing keys."""

import asyncio
from typing import Any

from millstream.errors import Reject
from millstream.model import Message, Retry, State
from millstream.testing.contract import Case, Letter, entry

Output = dict[str, object]


def keyed(message: Message, state: State) -> Output | None:
    """Count the messages of a key; fail, reject or clear the state if the message asks for it."""
    state["count"] = state.get("count", 0) + 1
    match message.text("ask"):
        case "reject":
            raise Reject("not counted")
        case "forget":
            state.clear()
        case "fail" if message.attempt < 3:
            raise RuntimeError("a failed attempt leaves no trace in the state")
        case "spoil":
            state["thing"] = object()
    return {"key": message.text("key"), "n": message.text("n"), "count": state.get("count", 0)}


async def keyed_async(message: Message, state: State) -> Output | None:
    """As `keyed`, but later messages of a key run faster than earlier ones."""
    await asyncio.sleep(0.02 / (1 + int(message.fields["n"])))
    return keyed(message, state)


_ASKS = ("", "fail", "reject", "", "fail", "forget", "", "spoil", "")
_COUNTS = (1, 2, None, 3, 4, 0, 1, None, 2)
_KEYS = range(4)
_PLACES = [(n, key) for n in range(len(_ASKS)) for key in _KEYS]
_KEYED: dict[str, Any] = {
    "entries": [entry(key=f"k{key}", n=n, ask=_ASKS[n]) for n, key in _PLACES],
    "outputs": [{"key": f"k{key}", "n": n, "count": _COUNTS[n]} for n, key in _PLACES if _COUNTS[n] is not None],
    "order_by": "key",
    "letters": [
        Letter(entry=at, reason="rejected" if _ASKS[n] == "reject" else "bad-output")
        for at, (n, _) in enumerate(_PLACES)
        if _COUNTS[n] is None
    ],
}
_KEYED_OPTIONS = {"key": "key", "retry": Retry(attempts=3, delay_ms=20)}
_STREAM: dict[str, Any] = {
    "entries": [entry(key="all", n=n, ask=ask) for n, ask in enumerate(_ASKS)],
    "outputs": [{"key": "all", "n": n, "count": count} for n, count in enumerate(_COUNTS) if count is not None],
    "order_by": "key",
    "letters": [
        Letter(entry=n, reason="rejected" if _ASKS[n] == "reject" else "bad-output")
        for n, count in enumerate(_COUNTS)
        if count is None
    ],
}
_STREAM_OPTIONS = {"order": "stream", "retry": Retry(attempts=3, delay_ms=20)}


def key_lists(messages: list[Message], state: State) -> list[Output | None]:
    """As `keyed`, on a list of messages of one key."""
    return [keyed(message, state) for message in messages]


async def key_lists_async(messages: list[Message], state: State) -> list[Output | None]:
    """As `key_lists`."""
    await asyncio.sleep(0.001)
    return key_lists(messages, state)


_LONGEST, _BURST = 4, 12  # lists that a death ends early leave enough for a full one


def list_lengths(messages: list[Message], state: State) -> list[Output]:
    """Output of each message whether its list is short enough, and where it comes in its key.

    The last one outputs how long the longest list of the key was.
    """
    outputs: list[Output] = []
    state["longest"] = max(state.get("longest", 0), len(messages))
    for message in messages:
        state["count"] = state.get("count", 0) + 1
        is_fit = len(messages) <= _LONGEST and message.key == messages[0].key
        output = {"key": message.text("key"), "n": message.text("n"), "count": state["count"], "is_fit": is_fit}
        outputs.append(output | ({"longest": state["longest"]} if state["count"] == _BURST else {}))
    return outputs


async def list_lengths_async(messages: list[Message], state: State) -> list[Output]:
    """As `list_lengths`."""
    await asyncio.sleep(0)
    return list_lengths(messages, state)


_LENGTHS: dict[str, Any] = {
    "options": {"key": "key", "batch_size": _LONGEST},
    "entries": [entry(key=key, n=n) for n in range(_BURST) for key in "abc"],
    "outputs": [
        {"key": key, "n": n, "count": n + 1, "is_fit": "true"} | ({"longest": _LONGEST} if n == _BURST - 1 else {})
        for key in "abc"
        for n in range(_BURST)
    ],
    "order_by": "key",
}


def parks(message: Message, state: State) -> Output:
    """Count the messages of a key; fail in each attempt on messages that ask for it."""
    state["count"] = state.get("count", 0) + 1
    if message.text("ask") == "fail":
        raise RuntimeError("fails until an operator acts")
    return {"key": message.key or b"", "n": message.text("n"), "count": state["count"], "attempt": message.attempt}


async def parks_async(message: Message, state: State) -> Output:
    """As `parks`."""
    await asyncio.sleep(0)
    return parks(message, state)


def parks_lists(messages: list[Message], state: State) -> list[Output]:
    """As `parks`, on a list of messages of one key."""
    return [parks(message, state) for message in messages]


_PARKED = {"a": 2, "b": 0}
_PARKS: dict[str, Any] = {
    "entries": [entry(key=key, n=n, ask="fail" if n == _PARKED.get(key) else "") for n in range(6) for key in "abc"],
    "outputs": [
        {"key": key, "n": n, "count": n + 1 - (n > _PARKED.get(key, n)), "attempt": 1}
        for n in range(6)
        for key in "abc"
        if n != _PARKED.get(key)
    ],
    "order_by": "key",
    "letters": [
        Letter(entry=3 * n + "abc".index(key), reason="skipped", attempts=2, says="skipped")
        for key, n in _PARKED.items()
    ],
    "parks": {key.encode(): 6 - n for key, n in _PARKED.items()},
}
_PARKS_OPTIONS = {"key": "key", "retry": Retry(attempts=2, delay_ms=10, then="park")}


def blocks(message: Message, state: State) -> Output:
    """Fail as often as the message asks for, which is more than `Retry.attempts`."""
    state["count"] = state.get("count", 0) + 1
    if message.attempt <= int(message.fields["fails"]):
        raise RuntimeError("not yet")
    return {"key": message.key or b"-", "n": message.text("n"), "count": state["count"], "attempt": message.attempt}


def blocks_unkeyed(message: Message) -> Output:
    """As `blocks`."""
    return blocks(message, State())


_BLOCK_FAILS = {("a", 1): 4, ("b", 0): 3}
_BLOCKED = [(key, n, _BLOCK_FAILS.get((key, n), 0)) for n in range(4) for key in "abc"]
_BLOCK = Retry(attempts=2, delay_ms=300, factor=1.5, jitter=0, then="block")


def cancels(message: Message, state: State) -> Output:
    """Count the messages of a key; fail in each attempt, or reject, if the message asks for it."""
    state["count"] = state.get("count", 0) + 1
    if message.text("ask") == "reject":
        raise Reject("and all after it")
    if message.text("ask") == "fail":
        raise RuntimeError("fails in each attempt")
    return {"key": message.key or b"", "n": message.text("n"), "count": state["count"]}


async def cancels_async(message: Message, state: State) -> Output:
    """As `cancels`."""
    await asyncio.sleep(0)
    return cancels(message, state)


_CANCEL = Retry(attempts=2, delay_ms=10, then="cancel")
_CANCELING = {("a", 2): "fail", ("b", 0): "reject", ("b", 3): "fail"}
_CANCELED_FROM = {"a": 2, "b": 0}
_PLACES_OF_CANCEL = [(n, key) for n in range(6) for key in "abc"]
_CANCELS: dict[str, Any] = {
    "entries": [entry(key=key, n=n, ask=_CANCELING.get((key, n), "")) for n, key in _PLACES_OF_CANCEL],
    "outputs": [{"key": key, "n": n, "count": n + 1} for n, key in _PLACES_OF_CANCEL if n < _CANCELED_FROM.get(key, 6)],
    "order_by": "key",
    "letters": [
        Letter(entry=at, reason="canceled", attempts=0, says="of its key became a dead letter")
        for at, (n, key) in enumerate(_PLACES_OF_CANCEL)
        if n > _CANCELED_FROM.get(key, 6)
    ]
    + [Letter(entry=1, reason="rejected"), Letter(entry=6, reason="failed", attempts=2)],
}
_CANCELS_OPTIONS = {"key": "key", "retry": _CANCEL}


def key_length(message: Message) -> str | None:
    """Return the key of a message: the first `letters` letters of its word."""
    return (message.text("word") or "")[: int(message.fields["letters"])] or None


def key_function(message: Message, state: State) -> Output:
    """Output the key, and the number of its messages so far."""
    state["count"] = state.get("count", 0) + 1
    return {"key": message.key or b"-", "count": state["count"]}


def unordered(message: Message, state: State) -> Output:
    """Output the key; a message without one has an empty state that is not stored."""
    state["count"] = state.get("count", 0) + 1
    return {"key": message.key or b"-", "count": state["count"]}


KEYED_CASES: tuple[Case, ...] = (
    Case(
        name="keyed",
        promise="the messages of a key run one by one in stream order, with retries too, each with the state that the "
        "previous one committed",
        function=keyed,
        options=_KEYED_OPTIONS,
        **_KEYED,
    ),
    Case(
        name="keyed_async",
        promise="so do the messages of an async handler, while other keys run at the same time",
        function=keyed_async,
        options=_KEYED_OPTIONS,
        **_KEYED,
    ),
    Case(
        name="whole_stream",
        promise='with order="stream" all messages of a stream run one by one, with the state of the stream',
        function=keyed,
        options=_STREAM_OPTIONS,
        **_STREAM,
    ),
    Case(
        name="whole_stream_async",
        promise="so do the messages of an async handler",
        function=keyed_async,
        options=_STREAM_OPTIONS,
        **_STREAM,
    ),
    Case(
        name="announced",
        promise="so do the messages of a stream that is announced to the handler's service",
        function=keyed,
        options={**_STREAM_OPTIONS, "announced": "contract-announced"},
        **_STREAM,
    ),
    Case(
        name="parks",
        promise='with then="park" a key is parked after the last failed attempt, and continues in order after unpark; '
        "other keys go on meanwhile",
        function=parks,
        options=_PARKS_OPTIONS,
        **_PARKS,
    ),
    Case(
        name="parks_async",
        promise="so is a key of an async handler",
        function=parks_async,
        options=_PARKS_OPTIONS,
        **_PARKS,
    ),
    Case(
        name="whole_stream_parks",
        promise='so is a stream with order="stream"',
        function=parks,
        options={"order": "stream", "retry": Retry(attempts=2, delay_ms=10, then="park")},
        entries=[entry(n=n, ask="fail" if n == 2 else "") for n in range(6)],
        outputs=[
            {"key": "{whole_stream_parks}.in", "n": n, "count": n + 1 - (n > 2), "attempt": 1}
            for n in range(6)
            if n != 2
        ],
        order_by="key",
        letters=[Letter(entry=2, reason="skipped", attempts=2)],
        parks={b"{whole_stream_parks}.in": 4},
    ),
    Case(
        name="cancels",
        promise='with then="cancel" the messages that were published after a dead letter of their key, and before its '
        "commit, become dead letters too, in order and without a run; other keys go on",
        function=cancels,
        options=_CANCELS_OPTIONS,
        **_CANCELS,
    ),
    Case(
        name="cancels_async",
        promise="so do those of an async handler",
        function=cancels_async,
        options=_CANCELS_OPTIONS,
        **_CANCELS,
    ),
    Case(
        name="whole_stream_cancels",
        promise='so does a stream with order="stream"',
        function=cancels,
        options={"order": "stream", "retry": _CANCEL},
        entries=[entry(n=n, ask="fail" if n == 2 else "") for n in range(6)],
        outputs=[{"key": "{whole_stream_cancels}.in", "n": n, "count": n + 1} for n in range(2)],
        order_by="key",
        letters=[
            Letter(entry=2, reason="failed", attempts=2),
            *(Letter(entry=n, reason="canceled", attempts=0) for n in range(3, 6)),
        ],
    ),
    Case(
        name="blocks",
        promise='with then="block" a message is retried until it succeeds, and its key waits for it',
        function=blocks,
        options={"key": "key", "retry": _BLOCK},
        entries=[entry(key=key, n=n, fails=fails) for key, n, fails in _BLOCKED],
        outputs=[{"key": key, "n": n, "count": n + 1, "attempt": fails + 1} for key, n, fails in _BLOCKED],
        order_by="key",
    ),
    Case(
        name="blocks_unkeyed",
        promise="so is a message without a key, while others go on",
        function=blocks_unkeyed,
        options={"retry": _BLOCK},
        entries=[entry(n=n, fails=fails) for n, fails in enumerate((0, 4, 0))],
        outputs=[{"key": "-", "n": n, "count": 1, "attempt": fails + 1} for n, fails in enumerate((0, 4, 0))],
    ),
    Case(
        name="key_function",
        promise="a function may compute the key; if it fails or returns none, the message is a dead letter",
        function=key_function,
        options={"key": key_length},
        entries=[
            entry(word="apple", letters=2),
            entry(word="apart", letters=2),
            entry(word="", letters=2),
            entry(word="apple", letters="x"),
            entry(word="bear", letters=1),
        ],
        outputs=[{"key": "ap", "count": 1}, {"key": "ap", "count": 2}, {"key": "b", "count": 1}],
        order_by="key",
        letters=[
            Letter(entry=2, reason="missing-key"),
            Letter(entry=3, reason="undecodable", says="the key function raised ValueError"),
        ],
    ),
    Case(
        name="missing_key",
        promise="a message without its key field is a dead letter, and its handler does not see it",
        function=key_function,
        options={"key": "key"},
        entries=[entry(key="a"), entry(other="a"), entry(key=""), entry(key="a")],
        outputs=[{"key": "a", "count": 1}, {"key": "a", "count": 2}],
        order_by="key",
        letters=[Letter(entry=1, reason="missing-key"), Letter(entry=2, reason="missing-key")],
    ),
    Case(
        name="repeated_key",
        promise="if an entry repeats the key field, its last value is the key; a value that reads like its name is none",
        function=key_function,
        options={"key": "key"},
        entries=[
            [b"key", b"x", b"n", b"key", b"key", b"a"],
            [b"n", b"key", b"key", b"a", b"m", b"key"],
            [b"key", b"a", b"key", b"b"],
        ],
        outputs=[{"key": "a", "count": 1}, {"key": "a", "count": 2}, {"key": "b", "count": 1}],
        order_by="key",
    ),
    Case(
        name="unordered",
        promise="or, with missing_key='unordered', it is processed without order and without a stored state",
        function=unordered,
        options={"key": "key", "missing_key": "unordered"},
        entries=[entry(key="a"), entry(other="a"), entry(other="b"), entry(key="a")],
        outputs=[{"key": "a", "count": 1}, *2 * [{"key": "-", "count": 1}], {"key": "a", "count": 2}],
        order_by="key",
    ),
    Case(
        name="key_lists",
        promise="a list of messages of one key, in stream order, has the state that the previous list committed; a "
        "message at which its list fails is split off, and keeps its place",
        function=key_lists,
        options=_KEYED_OPTIONS,
        **_KEYED,
    ),
    Case(
        name="key_lists_async",
        promise="so do the lists of an async handler",
        function=key_lists_async,
        options={**_KEYED_OPTIONS, "batch_size": 4},
        **_KEYED,
    ),
    Case(
        name="key_lists_wait",
        promise="so do lists that wait for more messages of their key; no message waits for ever",
        function=key_lists,
        options={**_KEYED_OPTIONS, "batch_size": 5, "batch_wait_ms": 200},
        **_KEYED,
    ),
    Case(
        name="list_lengths",
        promise="messages of a key that wait run together, as many as batch_size, never more, and never those of two keys; "
        "the lists of a key follow one another in its order, with no message in two",
        function=list_lengths,
        **_LENGTHS,
    ),
    Case(
        name="list_lengths_async",
        promise="so do the lists of an async handler",
        function=list_lengths_async,
        **_LENGTHS,
    ),
    Case(
        name="key_lists_parks",
        promise='with then="park" the message at which a list fails parks its key',
        function=parks_lists,
        options=_PARKS_OPTIONS,
        **_PARKS,
    ),
)
