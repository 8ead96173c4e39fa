"""The handler contract: what a handler may rely on under any engine, and how to run an engine against it.

A `Case` is a handler, its input entries, and the required result: outputs, dead letters, and nothing left over.
`run_cases` runs an engine on any number of cases at once; `verify` checks one case. The cases of millstream's own
engines are `millstream.testing.contract_cases.CASES`.

The idea is one suite that every implementation inherits, like the `StreamsTestMixin` of Arroyo (getsentry).
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream.admin.inspection import state_expiry
from millstream.admin.key_queues import list_queues, skip, unpark
from millstream.app import App
from millstream.balancer import announce
from millstream.delivery.delayed_messages import DelayedMessages
from millstream.errors import MillstreamError
from millstream.handlers.dead_letter import DeadLetter, Reason
from millstream.handlers.schedule import Missed, Schedule
from millstream.handlers.upcasting import encode_state
from millstream.model import EntryId, State, value_of
from millstream.producer.firings import Firings
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import REDRIVE_FIELD, HandlerKeys
from millstream.redis_client.replies import mapping_of
from millstream.redis_client.resp import Command

APP = "contract"
"""Name of the app that `app_of` makes."""

Pairs = Sequence[bytes]

_RARELY = "366d"
"""When the schedules of cases fire: so rarely that only what they have missed is due."""


class ContractBroken(MillstreamError, AssertionError):
    """An engine breaks a case of the contract. The message lists the differences."""


class Engine(Protocol):
    """Runs handlers: a worker, a Spark pipeline, or an engine of your own."""

    def __call__(self, app: App, url: str, until: Callable[[], bool]) -> None:
        """Run all handlers of `app`, and its schedules, on the Redis at `url` until `until()` is true, then stop.

        Stop as in production. Call `until` several times a second, from one thread, and let its exceptions through after
        stopping. If a message kills the engine, restart it, as its supervisor would in production.
        """


@dataclass(frozen=True, kw_only=True)
class Letter:
    """The required dead letter of entry number `entry`, with its fields byte for byte.

    * `reason`, `attempts`: as in the dead letter; `says`: part of its error text
    * `pairs`: the fields, if they differ from the entry's
    """

    entry: int
    reason: Reason
    attempts: int = 1
    says: str = ""
    pairs: Pairs | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One promise of the contract.

    * `name`: of the case and of its handler; its stream and its output stream are named after it
    * `promise`: the promise, in a sentence
    * `function`, `options`: the handler, as for `App.handler`; "into" is set unless `options` has it
    * `entries`: the published entries, names and values; entry n gets the id `entry_id(n)`
    * `outputs`: the fields of every entry that the output stream must hold afterwards, in any order...
    * `order_by`: ...except that entries with the same value of this field keep the order given here
    * `at_most`: with `into_maxlen`: the most entries that the output stream may hold, all of them from `outputs`
    * `letters`: the required dead letters
    * `stop_after`: the engine is stopped after so many outputs, and restarted
    * `parks`: the keys that are parked, with the number of messages in each key queue. Once a queue has that many, its
      first message is skipped and the key is unparked
    * `kills`: the handler kills its process: run the case in a process of its own
    * `timers`: how many messages its timers add to its stream; no timer may be left
    * `states`: the states that an earlier version of the app has left, by key: version and content
    * `last_changes`: for each key of which a state is left: which of its outputs (from 0, in order) comes from the last
      message that changed the state. It has one before and one after it, a while apart; its handler has `state_ttl_ms`
    * `schedule`: the function of a schedule of its stream, as for `App.every`, which misses `firings` firings before the
      engine starts; `missed`: which of them it publishes, with "skip" none
    """

    name: str
    promise: str
    function: Callable[..., Any]
    entries: Sequence[Pairs]
    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Mapping[str, object]] = ()
    order_by: str | None = None
    at_most: int | None = None
    letters: Sequence[Letter] = ()
    stop_after: int | None = None
    kills: bool = False
    parks: Mapping[bytes, int] = field(default_factory=dict)
    timers: int = 0
    states: Mapping[bytes, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    last_changes: Mapping[bytes, int] = field(default_factory=dict)
    schedule: Callable[..., Any] | None = None
    firings: int = 0
    missed: Missed = "all"

    @property
    def messages(self) -> int:
        """How many messages its handler commits in the end."""
        published = {"all": self.firings, "once": min(self.firings, 1), "skip": 0}
        return len(self.entries) + self.timers + published[self.missed]

    @property
    def stream(self) -> str:
        """The stream that its handler reads."""
        return f"{{{self.name}}}.in"

    @property
    def into(self) -> str:
        """The output stream of its handler."""
        return f"{{{self.name}}}.out"

    @property
    def keyed(self) -> bool:
        """True if its handler has a key, which not every engine supports."""
        return "key" in self.options or self.options.get("order") == "stream"

    @property
    def keys(self) -> HandlerKeys:
        """The names of its handler's keys in Redis."""
        return HandlerKeys(APP, self.name, self.stream)


def entry_id(number: int) -> str:
    """Return the id of a case's entry `number`, from 0. As text, the ids do not sort in their numeric order."""
    return f"{995 + number // 3}-{number % 3 * 9}"


def entry(**fields: str | int | bytes) -> Pairs:
    """Return an entry with these fields."""
    return [part for item in fields.items() for part in map(_bytes, item)]


def app_of(cases: Iterable[Case]) -> App:
    """Return an app with the handlers and schedules of `cases`."""
    app = App(APP)
    for case in cases:
        options = {"into": case.into, **case.options, "name": case.name}
        streams = () if "announced" in options else (case.stream,)
        app.handler(*streams, **options)(case.function)
        if case.schedule is not None:
            app.every(_RARELY, stream=case.stream, missed=case.missed, name=case.name)(case.schedule)
    return app


def _schedules(case: Case) -> Collection[Schedule]:
    return () if case.schedule is None else app_of([case]).schedules.values()


def run_cases(engine: Engine, url: str, cases: Sequence[Case], *, within_s: float = 120.0) -> None:
    """Publish the entries of `cases` to an empty Redis and run `engine` until all entries are committed.

    Verify each case afterwards. Raises ContractBroken if entries are left after `within_s` seconds, or if a case with
    `stop_after` was complete before the engine stopped.
    """
    stopped = [case for case in cases if case.stop_after is not None]
    with Client(url) as client:
        for case in cases:
            publish(client, case)
        if stopped:
            halfway = _Deadline(
                lambda: all(_outputs(client, case) >= (case.stop_after or 0) for case in stopped), within_s
            )
            engine(app_of(cases), url, halfway)
            complete = [case.name for case in stopped if _committed(client, case) >= case.messages]
            if complete:
                raise ContractBroken(f"the engine stopped too late to test a restart: {', '.join(complete)}")
        operators = [_Operator(client, case) for case in cases if case.parks]

        def is_complete() -> bool:
            for operator in operators:
                operator.skip_parked()
            return all(_is_complete(client, case) for case in cases)

        done = _Deadline(is_complete, within_s)
        try:
            engine(app_of(cases), url, done)
        except TimeoutError:
            left = ", ".join(_progress(client, case) for case in cases)
            raise ContractBroken(f"incomplete after {within_s:.0f} s: {left}") from None


def publish(client: Client, case: Case) -> None:
    """Publish the entries of `case` and store its states; announce its stream, if its handler reads announced streams.

    Its schedule, if it has one, has then missed its firings.
    """
    commands: list[Command] = [("XADD", case.stream, entry_id(n), *pairs) for n, pairs in enumerate(case.entries)]
    for key, (version, content) in case.states.items():
        commands.append(("HSET", case.keys.state, key, encode_state(State(content), version)))
    for reply in client.pipeline(commands):
        raise_if_error(reply)
    if "announced" in case.options:
        announce(client, case.options["announced"], case.stream)
    for schedule in _schedules(case):
        firings = Firings(client, schedule)
        record = firings.read()
        last_ms, *_ = schedule.times.last_between(0, record.now_ms, case.firings + 1)
        firings.publish(record, last_ms)


def verify(client: Client, case: Case) -> None:
    """Raise ContractBroken unless `case` holds: its outputs, dead letters and states, and nothing left over."""
    problems = [
        *_wrong_outputs(client, case),
        *_wrong_letters(client, case),
        *_wrong_expiries(client, case),
        *_leftovers(client, case),
    ]
    if problems:
        raise ContractBroken(f"{case.name}: {case.promise}. But " + "; ".join(problems))


@dataclass
class _Operator:
    """The operator of a case: acts on its parked keys."""

    client: Client
    case: Case
    unparked: set[bytes] = field(default_factory=set)

    def skip_parked(self) -> None:
        """Skip the first message of each key that is parked with all of its messages, and unpark the key."""
        for queue in list_queues(self.client, self.case.keys) if self.unparked < self.case.parks.keys() else ():
            key = queue.key or b""
            is_due = key not in self.unparked and self.case.parks.get(key) == queue.length
            if is_due and queue.state == "parked" and skip(self.client, self.case.keys, queue.name, error="skipped"):
                unpark(self.client, self.case.keys, queue.name)
                self.unparked.add(key)


# --- Progress of the engine ---


@dataclass(frozen=True)
class _Deadline:
    """True once `condition()` is; raises TimeoutError `within_s` seconds after its creation."""

    condition: Callable[[], bool]
    within_s: float
    began_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> bool:
        if self.condition():
            return True
        if time.monotonic() - self.began_s > self.within_s:
            raise TimeoutError
        return False


def _outputs(client: Client, case: Case) -> int:
    return int(client.execute("XLEN", case.into))


def _committed(client: Client, case: Case) -> int:
    return int(client.execute("HGET", case.keys.meta, "committed") or 0)


def _is_complete(client: Client, case: Case) -> bool:
    return _committed(client, case) >= case.messages and not _has_due_firing(client, case)


def _progress(client: Client, case: Case) -> str:
    due = " and a firing is due" if _has_due_firing(client, case) else ""
    return f"{case.name} {_committed(client, case)}/{case.messages}{due}"


def _has_due_firing(client: Client, case: Case) -> bool:
    """Whether a firing of its schedule is neither published nor left out yet."""
    records = [(one, Firings(client, one).read()) for one in _schedules(case)]
    return any(one.times.last_between(record.last_ms, record.now_ms, 1) for one, record in records)


# --- Results ---


def _wrong_outputs(client: Client, case: Case) -> Iterator[str]:
    found = [_pairs_of(pairs) for _, pairs in client.execute("XRANGE", case.into, "-", "+")]
    wanted = [_pairs_of(part for item in output.items() for part in map(_bytes, item)) for output in case.outputs]
    extra = Counter(found) - Counter(wanted)
    missing = Counter(wanted) - Counter(found) if case.at_most is None else None
    if extra:
        yield f"it has unexpected or repeated outputs: {_some(extra)}"
    if missing:
        yield f"it lacks outputs: {_some(missing)}"
    if case.at_most is not None and not 0 < len(found) <= case.at_most:
        yield f"it has {len(found)} outputs, not 1 to {case.at_most}"
    if case.order_by is not None and not extra and not missing:
        groups = _grouped(found, case.order_by), _grouped(wanted, case.order_by)
        wrong = [value for value, outputs in groups[0].items() if outputs != groups[1][value]]
        if wrong:
            yield f"its outputs of {case.order_by}={wrong[0]!r} are out of order: {groups[0][wrong[0]]}"


def _grouped(outputs: Iterable[tuple[bytes, ...]], name: str) -> dict[bytes, list[tuple[bytes, ...]]]:
    groups: dict[bytes, list[tuple[bytes, ...]]] = {}
    for output in outputs:
        groups.setdefault(output[output.index(name.encode()) + 1], []).append(output)
    return groups


def _wrong_letters(client: Client, case: Case) -> Iterator[str]:
    entries = client.execute("XRANGE", case.keys.dead_letters, "-", "+")
    found = {letter.id: letter for letter in (DeadLetter.parse(*items) for items in entries)}
    if len(found) < len(entries):
        yield f"it has {len(entries)} dead letters for {len(found)} entries"
    wanted = {entry_id(letter.entry): letter for letter in case.letters}
    for unexpected in found.keys() - wanted.keys():
        yield f"entry {unexpected} is a dead letter: {found[unexpected].reason}, {found[unexpected].error}"
    for one_id, letter in wanted.items():
        if one_id not in found:
            yield f"entry {one_id} is not a dead letter ({letter.reason})"
        else:
            yield from _wrong_letter(case, letter, found[one_id])


def _wrong_letter(case: Case, wanted: Letter, found: DeadLetter) -> Iterator[str]:
    pairs = case.entries[wanted.entry] if wanted.pairs is None else wanted.pairs
    owner = APP, case.name, case.stream
    for what, actual, expected in (
        ("reason", found.reason, wanted.reason),
        ("attempts", found.attempts, wanted.attempts),
        ("fields", list(found.pairs), list(pairs)),
        ("owner", (found.app, found.handler, found.stream), owner),
    ):
        if actual != expected:
            yield f"the {what} of dead letter {found.id} is {actual!r}, not {expected!r} (error: {found.error})"
    if wanted.says not in found.error:
        yield f"the error of dead letter {found.id} is {found.error!r}, without {wanted.says!r}"
    if wanted.reason == "failed" and "limit" not in wanted.says and case.function.__name__ not in found.traceback:
        yield f"the traceback of dead letter {found.id} does not name the handler: {found.traceback!r}"


def _wrong_expiries(client: Client, case: Case) -> Iterator[str]:
    entries = client.execute("XRANGE", case.into, "-", "+") if case.last_changes else ()
    for key, at in case.last_changes.items():
        # The ids have the times of the commits, by the clock by which the state expires.
        times = [EntryId.parse(one_id).ms for one_id, pairs in entries if value_of(pairs, _bytes(case.order_by)) == key]
        expires_ms = state_expiry(client, case.keys, key)
        if expires_ms is None:
            yield f"the state of key {key!r} does not expire, or is gone"
        elif len(times) > at + 1 and not times[at - 1] < expires_ms - case.options["state_ttl_ms"] < times[at + 1]:
            yield f"the state of key {key!r} does not expire so long after output {at}: at {expires_ms}, outputs at {times}"


def _leftovers(client: Client, case: Case) -> Iterator[str]:
    committed = _committed(client, case)
    if committed != case.messages:
        yield f"{committed} of {case.messages} entries are committed"
    published = client.execute("XLEN", case.stream)
    if published != case.messages:
        yield f"its stream has {published} entries, not {case.messages}"
    waiting = DelayedMessages(client).count(case.stream)
    if waiting:
        yield f"{waiting} timers are left"
    for items in client.execute("XINFO", "GROUPS", case.stream):
        group = mapping_of(items)
        if group[b"name"] == case.keys.group.encode() and group[b"pending"]:
            yield f"{group[b'pending']} entries are pending"
    left = client.execute("HGETALL", case.keys.crashes)
    if left:
        yield f"crash counts are left: {left}"


def _pairs_of(items: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(items)


def _some(found: Mapping[tuple[bytes, ...], int]) -> str:
    return f"{list(found)[:5]}{f' and {len(found) - 5} more' if len(found) > 5 else ''}"


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def redriven(handler: str, pairs: Pairs) -> Pairs:
    """Return an entry as `millstream dlq redrive` writes it, meant for the handler `app.name` only."""
    return [REDRIVE_FIELD, handler.encode(), *pairs]
