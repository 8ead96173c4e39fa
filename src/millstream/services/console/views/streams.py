"""Streams: a list by prefix, and one stream with its groups and entries."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.responses import Response

from millstream.admin.entry_pages import read_entries, read_newest
from millstream.admin.inspection import find_stream_names, handler_of, inspect_stream
from millstream.admin.stream_order import ORDERS, ListedStream, StreamOrder, list_streams, ordered
from millstream.admin.time_inputs import parse_start
from millstream.errors import MillstreamError
from millstream.groups import Group
from millstream.model import EntryId
from millstream.redis_client.escaping import escape
from millstream.redis_client.key_names import PREFIX, to_wire
from millstream.services.console.pages import PageRequest
from millstream.services.console.ranked_streams import MOST_RANKED, Ranking

_PAGE = 100
_MOST_GROUPS = 20
_KEEP_MS = 5_000.0
_COUNT_MS = 50.0
_MOST_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a list of streams.

    * `found`: its streams; `first`: the number of the first one, from 0
    * `following`: the parameters of the next part; none if this is the last one
    * `is_ordered`: it is in the order that was asked for, by `ranking` if not all streams were read for it
    """

    found: Sequence[ListedStream]
    first: int
    following: Mapping[str, str] = field(default_factory=dict)
    is_ordered: bool = False
    ranking: Ranking | None = None


def streams(page: PageRequest) -> Response:
    """The streams whose names begin with a prefix, a hundred at a time."""
    prefix = page.name("prefix") or ""
    known = None if prefix.startswith(f"{PREFIX}:") else page.names.find(prefix)
    names, is_partial = (known.names, known.is_partial) if known is not None else _scan(page, prefix)
    order = next((one for one in ORDERS if one == page.query.get("order")), None)
    if order is not None and len(names) <= MOST_RANKED and not is_partial:
        part = _by_figure(page, prefix, names, order)
    elif order is not None and known is not None:
        part = _by_ranking(page, prefix, order)
    else:
        part = _by_name(page, names)
    age_ms = part.ranking.age_ms if part.ranking else None
    return page.render(
        "streams.html",
        prefix=page.query.get("prefix", ""),
        part=part,
        has_rates=all(one.rate is not None for one in part.found),
        orders=ORDERS,
        order=order,
        most_ordered=MOST_RANKED,
        total=len(names),
        is_partial=is_partial,
        is_scanning=known is not None,
        of_ms=page.now_ms - known.age_ms if known is not None else None,
        since_ms=page.now_ms - age_ms if age_ms is not None else None,
    )


def _by_name(page: PageRequest, names: Sequence[str]) -> _Part:
    after = page.name("after")
    first = bisect_right(names, after) if after else 0
    shown = names[first : first + _PAGE]
    following = {"after": escape(shown[-1])} if first + _PAGE < len(names) else {}
    return _Part(found=_list(page, shown), first=first, following=following)


def _by_figure(page: PageRequest, prefix: str, names: Sequence[str], order: StreamOrder) -> _Part:
    """In an order of so few streams that all are read at once."""
    read: Sequence[ListedStream] = page.shared.get(
        f"ordered {prefix}", page.now_ms, partial(_list_all, page, names), keep_ms=_KEEP_MS
    )
    found, first = ordered(read, order), _first_of(page)
    return _Part(
        found=found[first : first + _PAGE], first=first, following=_following(order, first, len(found)), is_ordered=True
    )


def _by_ranking(page: PageRequest, prefix: str, order: StreamOrder) -> _Part:
    """In an order of the figures that the ranking knows; those that are shown are read now."""
    ranking, first = page.ranking.find(prefix, order), _first_of(page)
    return _Part(
        found=ordered(_list(page, ranking.names[first : first + _PAGE]), order),
        first=first,
        following=_following(order, first, len(ranking.names)),
        is_ordered=True,
        ranking=ranking,
    )


def _first_of(page: PageRequest) -> int:
    """The number of the first stream of a part in an order, from 0."""
    asked = page.query.get("from", "")
    return min(int(asked), MOST_RANKED) if asked.isascii() and asked.isdigit() and len(asked) <= _MOST_DIGITS else 0


def _following(order: StreamOrder, first: int, count: int) -> Mapping[str, str]:
    return {"order": order, "from": str(first + _PAGE)} if first + _PAGE < count else {}


def _list_all(page: PageRequest, names: Sequence[str]) -> list[ListedStream]:
    """All these streams, read a hundred at a time: the reply on a stream has two entries whole."""
    found: list[ListedStream] = []
    for at in range(0, len(names), _PAGE):
        found += _list(page, names[at : at + _PAGE])
    return found


def _list(page: PageRequest, names: Sequence[str]) -> list[ListedStream]:
    """These streams with their rates, by this read and the one before."""
    read_ms = page.rates.now_ms()
    found = list_streams(page.client, names, budget_ms=_COUNT_MS)
    rates = page.rates.update([one.stream for one in found], read_ms)
    return [replace(one, rate=rates[one.stream.name]) for one in found]


def _scan(page: PageRequest, prefix: str) -> tuple[Sequence[str], bool]:
    """The names that begin with `prefix`, scanned for them alone, and whether there may be more."""
    found: tuple[Sequence[str], bool] = page.shared.get(
        f"streams {prefix}", page.now_ms, lambda: find_stream_names(page.client, prefix), keep_ms=_KEEP_MS
    )
    return found


def stream(page: PageRequest) -> Response:
    """One stream: its groups, and for those who may read messages its entries from an id or a time on."""
    name = page.wanted_name("name")
    found = inspect_stream(page.client, name)
    if found is None:
        raise MillstreamError("there is no such stream")
    start = page.query.get("from", "earliest")
    entries = None
    if page.may("payloads") and not page.is_renewal:
        first_id = parse_start(start)
        read = read_entries(page.client, name, str(first_id) if first_id else found.last_generated_id)
        entries = [(entry_id, page.display.fields(pairs)) for entry_id, pairs in read.entries]
    return page.render(
        "stream.html",
        found=found,
        groups=[(one, handler_of(name, one.name)) for one in found.groups],
        consumers=[
            (one.name, each)
            for one in found.groups[:_MOST_GROUPS]
            for each in Group(page.client, name, one.name).consumers()
        ],
        start=start,
        entries=entries,
        next_id=read.next_id if entries is not None else None,
    )


def tail(page: PageRequest) -> Response:
    """The newest entries of a stream; a reload marks those that have come since."""
    name = page.wanted_name("name")
    asked = page.query.get("after")
    seen = str(EntryId.parse(asked)) if asked else None
    found = read_newest(page.client, name, seen)
    if not found.entries and not page.client.execute("EXISTS", to_wire(name)):
        raise MillstreamError("there is no such stream")
    last_id = found.entries[0][0] if found.entries else seen
    return page.render(
        "tail.html",
        name=name,
        seen=seen,
        entries=[
            (one, seen is not None and EntryId.parse(one) > EntryId.parse(seen), page.display.fields(pairs))
            for one, pairs in found.entries
        ],
        gap_id=found.gap_id,
        last_id=last_id,
        following=page.url("/tail", name=escape(name), after=last_id, refresh=page.query.get("refresh")),
    )
