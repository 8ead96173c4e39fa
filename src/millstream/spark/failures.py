"""Why a query has ended, in one line, and whether trying again can mend it."""

import re
from contextlib import suppress
from dataclasses import dataclass

from py4j.protocol import Py4JError, Py4JJavaError

from millstream import errors
from millstream.errors import AccessDenied, ConfigError, DataLoss, MillstreamError, StaleOwner, WrongType

_FINAL = (StaleOwner, DataLoss, ConfigError, AccessDenied, WrongType)
_OUR_ERROR = re.compile(r"millstream\.errors\.(\w+): (.*)")
_ANY_ERROR = re.compile(r"^[\s|]*(?:Caused by: )?((?:\w+\.)*\w*(?:Error|Exception)): (.*)", re.MULTILINE)
_REASON_CHARS = 500
_OUTPUT_MODE = re.compile(r"redis-streams does not support (Update|Complete) mode$")
_WRITE_OTHERWISE = ": use the mode append, with a watermark if rows are summed up, or write in foreachBatch"
_PYTHON_LATE = "Python worker failed to connect back"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a query: one of our own errors, or None for any other; the `reason` is one line."""

    kind: type[MillstreamError] | None
    reason: str

    @property
    def final(self) -> bool:
        """Whether a person has to change something first."""
        return (self.kind is not None and issubclass(self.kind, _FINAL)) or _WRITE_OTHERWISE in self.reason

    @property
    def starved(self) -> bool:
        """Whether a Python process was not up within the ten seconds that Spark gives it, and lets nobody change."""
        return _PYTHON_LATE in self.reason


def failure_of(error: BaseException) -> Failure:
    """Find out what `error` is: raised on the driver, or told by Spark as text about an executor or a planner."""
    if isinstance(error, MillstreamError):
        return _failure(type(error), str(error))
    if isinstance(error, Py4JJavaError):
        return _failure(None, java_reason(error))
    text = str(error)
    for name, reason in reversed(_OUR_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MillstreamError):
            return _failure(kind, reason)
    others = [f"{name.rpartition('.')[2]}: {reason}" for name, reason in _ANY_ERROR.findall(text) if reason]
    return _failure(None, others[-1] if others else f"{type(error).__name__}: {text.strip()}")


def java_reason(error: Exception) -> str:
    """The first line of what Java says in `error`."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        with suppress(Py4JError, OSError):
            text = error.java_exception.toString()
    return text.strip().partition("\n")[0]


def _failure(kind: type[MillstreamError] | None, reason: str) -> Failure:
    line = reason.strip().partition("\n")[0].rstrip(".")[:_REASON_CHARS]
    hint = " within Spark's 10 seconds: has this machine too much to do?" if line.endswith(_PYTHON_LATE) else ""
    hint = _WRITE_OTHERWISE if _OUTPUT_MODE.search(line) else hint
    return Failure(kind=kind, reason=line + hint)
