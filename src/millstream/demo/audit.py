"""Audit: reads the run's results from Redis and compares them with the expected ones, entry by entry."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, get_args, get_type_hints

from millstream.demo.reference import Departure, Expected
from millstream.handlers.dead_letter import DeadLetter
from millstream.handlers.upcasting import parse_state
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.replies import mapping_of, pairs_of
from millstream.testing.history import check_outputs

KEYS = HandlerKeys("airline", "departure", "flights")
OUTPUT = "departures"

_CHUNK = 2_000
_SHOWN = 10
_READERS: Mapping[type, Callable[[bytes], Any]] = {
    str: bytes.decode,
    int: int,
    float: float,
    bool: {b"true": True, b"false": False}.__getitem__,
}
_FIELDS = {
    name.encode(): (name, next(reader for kind, reader in _READERS.items() if kind in (hint, *get_args(hint))))
    for name, hint in get_type_hints(Departure).items()
}
"""Of each field, its name in `Departure` and what reads its value."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """The contents of Redis after the run.

    * `published`: row of each entry of `flights`, in stream order
    * `departures`: the entries of `departures`, in stream order
    * `unreadable`: the errors of entries of `departures` that cannot be parsed
    * `dead`: row and reason of each dead letter
    * `states`: state of each aircraft
    """

    published: Sequence[int]
    departures: Sequence[Departure]
    unreadable: Sequence[str] = ()
    dead: Sequence[tuple[int, str]]
    states: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The verdict. Every fault counter is 0 in a correct run.

    * `lost`: flights with neither an entry in `departures` nor a dead letter
    * `duplicated`: entries and dead letters beyond the first of their flight
    * `unexpected`: entries without a flight, and dead letters of flights that have to succeed
    * `order_violations`: entries before an entry of an earlier flight of their aircraft
    * `wrong_values`: entries with a field that differs from the reference; `wrong_states`: states that differ
    * `examples`: some of the faults, as text
    """

    messages: int
    committed: int
    dead_letters: int
    dead_letters_by_reason: Mapping[str, int]
    lost: int
    duplicated: int
    unexpected: int
    order_violations: int
    wrong_values: int
    wrong_states: int
    examples: Sequence[str] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not (
            self.lost
            or self.duplicated
            or self.unexpected
            or self.order_violations
            or self.wrong_values
            or self.wrong_states
        )

    def figures(self) -> dict[str, Any]:
        """Return everything but the examples, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name != "examples"}


# --- Comparing ----------------------------------------------------------------------------------------------


def audit(expected: Expected, results: Results) -> Audit:
    """Compare `results` with `expected`. A pure function."""
    right = {departure.row: departure for flights in expected.departures.values() for departure in flights}
    source: dict[str | None, list[str]] = {
        tailnum: [str(departure.row) for departure in flights] for tailnum, flights in expected.departures.items()
    }
    source[None] = [str(row) for row in sorted(expected.unkeyed)]
    history = check_outputs(
        source,
        [(departure.tailnum, str(departure.row)) for departure in results.departures],
        [str(row) for row, _ in results.dead],
    )
    misplaced = list(_publishing_faults(len(right) + len(expected.unkeyed), results.published))
    wrongly_dead = list(_wrong_dead_letters(expected.unkeyed, results.dead))
    wrong_values = [*results.unreadable, *_wrong_values(right, results.departures)]
    wrong_states = list(_wrong_states(expected.states, results.states))
    found = (history.lost, history.duplicated, history.unexpected, history.out_of_order)
    texts = chain(*found, misplaced, wrongly_dead, wrong_values, wrong_states)
    return Audit(
        messages=len(results.published),
        committed=len(results.departures),
        dead_letters=len(results.dead),
        dead_letters_by_reason=dict(Counter(reason for _, reason in results.dead)),
        lost=len(history.lost),
        duplicated=len(history.duplicated),
        unexpected=len(history.unexpected) + len(misplaced) + len(wrongly_dead),
        order_violations=len(history.out_of_order),
        wrong_values=len(wrong_values),
        wrong_states=len(wrong_states),
        examples=tuple(str(text) for text, _ in zip(texts, range(_SHOWN), strict=False)),
    )


def _publishing_faults(flights: int, published: Sequence[int]) -> Iterator[str]:
    """Yield differences between the stream of flights and the source; the audit is valid only without any."""
    if len(published) != flights:
        yield f"the stream flights has {len(published)} entries, expected {flights}"
    for index, row in enumerate(published):
        if row != index:
            yield f"entry {index} of the stream flights is flight {row}"


def _wrong_dead_letters(unkeyed: set[int], dead: Iterable[tuple[int, str]]) -> Iterator[str]:
    for row, reason in dead:
        if row not in unkeyed or reason != "missing-key":
            yield f"flight {row} is a dead letter ({reason}), not {'missing-key' if row in unkeyed else 'an entry'}"


def _wrong_values(right: Mapping[int, Departure], departures: Iterable[Departure]) -> Iterator[str]:
    for departure in departures:
        wanted = right.get(departure.row)
        if wanted is not None and departure != wanted:
            fields = [
                f"{name} is {found!r}, expected {value!r}"
                for name, found, value in zip(Departure._fields, departure, wanted, strict=True)
                if found != value
            ]
            yield f"flight {departure.row} of {departure.tailnum} has wrong values: {', '.join(fields)}"


def _wrong_states(expected: Mapping[str, Mapping[str, int]], states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for tailnum in expected.keys() | states.keys():
        wanted, found = expected.get(tailnum, {}), states.get(tailnum, {})
        counted = {name: found.get(name) for name in wanted}
        if not wanted or counted != wanted:
            yield f"the state of {tailnum} is {dict(found)}, expected {dict(wanted)}"


# --- Reading ------------------------------------------------------------------------------------------------


def read_results(client: Client) -> Results:
    """Read all results from Redis. Raises RedisError."""
    departures: list[Departure] = []
    unreadable: list[str] = []
    for entry_id, items in _entries(client, OUTPUT):
        try:
            departures.append(_parse(items))
        except (KeyError, TypeError, ValueError) as error:
            unreadable.append(f"entry {entry_id.decode()} of {OUTPUT} is not a departure: {error!r}")
    letters = [DeadLetter.parse(letter_id, items) for letter_id, items in _entries(client, KEYS.dead_letters)]
    return Results(
        published=[_row(items) for _, items in _entries(client, KEYS.stream)],
        departures=departures,
        unreadable=unreadable,
        dead=[(_row(letter.pairs), letter.reason) for letter in letters],
        states=_read_states(client),
    )


def _entries(client: Client, stream: str) -> Iterator[tuple[bytes, Sequence[bytes]]]:
    after: bytes | str = "-"
    while chunk := client.execute("XRANGE", stream, after, "+", "COUNT", _CHUNK):
        yield from chunk
        after = b"(" + chunk[-1][0]


def _parse(items: Sequence[bytes]) -> Departure:
    values: dict[str, Any] = {}
    for field_name, value in pairs_of(items):
        name, read = _FIELDS[field_name]
        values[name] = read(value)
    if len(values) < len(items) // 2:
        raise ValueError("a field occurs twice")
    return Departure(**values)


def _row(items: Sequence[bytes]) -> int:
    """Return the flight's place in the source; -1, which no flight has, if there is none."""
    fields = mapping_of(items)
    return int(fields.get(b"row", b"-1"))


def _read_states(client: Client) -> dict[str, Mapping[str, Any]]:
    states: dict[str, Mapping[str, Any]] = {}
    cursor: bytes | int = 0
    while True:
        cursor, pairs = client.execute("HSCAN", KEYS.state, cursor, "COUNT", _CHUNK)
        states |= {k.decode(): parse_state(v) for k, v in pairs_of(pairs)}
        if int(cursor) == 0:
            return states
