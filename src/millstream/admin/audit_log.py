"""AuditLog: what operators have changed through the console and by commands, kept in one capped stream of Redis.

An action is recorded before it begins and again when it ends. So nothing is changed without a record, and an action
whose process died has a record without a result.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from millstream.errors import MillstreamError, RedisError, Unavailable
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import audit_key
from millstream.redis_client.replies import mapping_of

_MOST_RECORDS = 200_000  # two for each action
_UNKNOWN = "unknown, it may have been done"
_NOTHING_BEFORE = "0-0"
_MORE = re.compile(r" and [0-9,]+ more$")
"""Follows the first names in the record of an action on very many handlers."""
_LATER_PAGE = 1_000
_MOST_LATER = 50 * _LATER_PAGE
"""After so many records a result is no longer sought."""


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """One action.

    * `id`: id of its record; `at_ms`: when it began, in Unix milliseconds
    * `by`: the operator, as the console or the command knows them; `action`: the command, such as `key park`
    * `about`: the objects of the action, by name; {} if the record is unreadable
    * `result`: its result in words; None while it runs, or if its process died
    """

    id: str
    at_ms: int
    by: str
    action: str
    about: Mapping[str, str]
    result: str | None

    @property
    def outcome(self) -> str:
        """Its result, or that and why there is none."""
        unknown = "unknown: its process ended first, Redis was away, or it is under way"
        return unknown if self.result is None else self.result


@dataclass(frozen=True, kw_only=True)
class AuditFilter:
    """Which actions: those of operators, and of actions, whose names begin so, and about this handler; "" for any.

    An action on several handlers is about each of those that its record names.
    """

    by: str = ""
    action: str = ""
    handler: str = ""

    def matches(self, one: AuditRecord) -> bool:
        """Whether an action is one of these."""
        return (
            one.by.startswith(self.by)
            and one.action.startswith(self.action)
            and self.handler in ("", *_MORE.sub("", one.about.get("handler", "")).split(", "))
        )


_ANY = AuditFilter()


class RunningAction:
    """An action that runs. It sets its own `result`, which is recorded at its end.

    `done_before`: what it has done so far, in words, for the record of an error.
    """

    def __init__(self) -> None:
        self.result = "done"
        self.done_before = ""


def may_have_run(error: MillstreamError) -> bool:
    """Whether a command that ended in this error may have changed something: its reply was lost."""
    return isinstance(error, Unavailable) and error.unreachable


def failed_result(error: MillstreamError | str, done_before: str = "") -> str:
    """The result of an action that ended in this error. `done_before`: what it had done by then, in words.

    A text is an error that has changed nothing.
    """
    is_unknown = isinstance(error, MillstreamError) and may_have_run(error)
    what = f"{_UNKNOWN if is_unknown else 'failed'}: {error}"
    return f"{what}; {done_before} before" if done_before else what


class AuditLog:
    """The audit stream of one Redis, which holds about the last 100,000 actions."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @contextmanager
    def action(
        self,
        *,
        by: str,
        action: str,
        about: Mapping[str, str],
        on_unrecorded: Callable[[str, RedisError], None] | None = None,
    ) -> Iterator[RunningAction]:
        """Record an action of `by` before the block and its result after it.

        An error of the block is its result, with what was done before it, and raised. Raises RedisError before the
        block if nothing can be recorded; unless `on_unrecorded` is given, which is called with what is missing, and
        with the error: then the block runs.
        """
        record: str | None = None

        def end(result: str) -> None:
            if record is not None:
                with _reporting(on_unrecorded, "the result of this action"):
                    self.end(record, result)

        with _reporting(on_unrecorded, "this action"):
            record = self.begin(by=by, action=action, about=about)
        running = RunningAction()
        try:
            yield running
        except MillstreamError as error:
            end(failed_result(error, running.done_before))
            raise
        except KeyboardInterrupt:
            end(f"{_UNKNOWN}: interrupted")
            raise
        end(running.result)

    def begin(self, *, by: str, action: str, about: Mapping[str, str]) -> str:
        """Record an action of `by` that begins now; return the id of its record. Raises RedisError."""
        return self._add("by", by, "action", action, "about", msgspec.json.encode(_as_utf8(about)))

    def end(self, record: str, result: str) -> None:
        """Record what came of an action. Raises RedisError."""
        self._add("of", record, "result", result)

    def read(self, *, count: int = 100, since_ms: int = 0, wanted: AuditFilter = _ANY) -> list[AuditRecord]:
        """The newest `count` actions that are `wanted`, the newest first. Raises RedisError.

        `since_ms`: only those that began at this time or later, in Unix milliseconds.
        """
        return list(islice(filter(wanted.matches, self._actions(since_ms=since_ms)), count))

    def read_page(
        self, *, count: int, before: str = "+", wanted: AuditFilter = _ANY, most_read: int = 5_000
    ) -> tuple[list[AuditRecord], str | None]:
        """`count` actions that are `wanted` and began before the record `before`, and the record to go on before.

        It is None at the end of the audit. After `most_read` actions it ends with what it has. Raises RedisError.
        """
        found: list[AuditRecord] = []
        rest: str | None = None
        for number, one in enumerate(self._actions(before=before), 1):
            if wanted.matches(one):
                found.append(one)
            if count == len(found) or number == most_read:
                rest = one.id
                break
        return self._with_later_results(found, before), rest

    def _with_later_results(self, found: Sequence[AuditRecord], before: str) -> list[AuditRecord]:
        """These actions with the results that came after the record `before`: an action may take hours."""
        missing = {one.id for one in found if one.result is None}
        results: dict[str, str] = {}
        start = before
        for _ in range(_MOST_LATER // _LATER_PAGE):
            if before == "+" or not missing:
                break
            page = self._client.execute("XRANGE", audit_key(), start, "+", "COUNT", _LATER_PAGE)
            for _, pairs in page:
                fields = mapping_of(pairs)
                if (of := _text(fields, b"of")) in missing:
                    results[of] = _text(fields, b"result")
                    missing.remove(of)
            if len(page) < _LATER_PAGE:
                break
            start = f"({page[-1][0].decode()}"
        return [replace(one, result=results.get(one.id, one.result)) for one in found]

    def _actions(self, *, before: str = "+", since_ms: int = 0) -> Iterator[AuditRecord]:
        """The actions that began before the record `before`, the newest first."""
        if before == _NOTHING_BEFORE:  # Redis refuses an interval that ends there
            return
        results: dict[str, str] = {}
        end = "+" if before == "+" else f"({before}"
        for record_id, fields in self._newest_first(end, str(since_ms)):
            if b"of" in fields:
                results[_text(fields, b"of")] = _text(fields, b"result")
                continue
            yield AuditRecord(
                id=record_id,
                at_ms=int(record_id.partition("-")[0]),
                by=_text(fields, b"by"),
                action=_text(fields, b"action"),
                about=_about(fields.get(b"about", b"")),
                result=results.get(record_id),
            )

    def _newest_first(self, end: str, start: str) -> Iterator[tuple[str, Mapping[bytes, bytes]]]:
        """The records from `start` up to `end`."""
        while True:
            page = self._client.execute("XREVRANGE", audit_key(), end, start, "COUNT", 200)
            for record_id, pairs in page:
                yield record_id.decode(), mapping_of(pairs)
            if len(page) < 200:
                return
            end = f"({page[-1][0].decode()}"

    def _add(self, *pairs: str | bytes) -> str:
        wire = [one.encode("utf-8", "surrogateescape") if isinstance(one, str) else one for one in pairs]
        added: bytes = self._client.execute("XADD", audit_key(), "MAXLEN", "~", _MOST_RECORDS, "*", *wire)
        return added.decode()


@contextmanager
def _reporting(report: Callable[[str, RedisError], None] | None, what: str) -> Iterator[None]:
    """Call `report` with an error of the block, and `what` it leaves unrecorded; raise the error without one."""
    try:
        yield
    except RedisError as error:
        if report is None:
            raise
        report(what, error)


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")


def _as_utf8(about: Mapping[str, str]) -> dict[str, str]:
    """These texts with the bytes that are not UTF-8 escaped, as JSON cannot hold them."""
    return {
        name: one.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name, one in about.items()
    }


def _about(stored: bytes) -> Mapping[str, str]:
    try:
        return msgspec.json.decode(stored, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
