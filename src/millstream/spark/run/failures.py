"""Why a query has ended, in one line, and whether trying again can mend it, or a new checkpoint."""

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
_VAGUE = ("Task not serializable", "Task serialization failed")
"""What Spark says whatever has kept it from serialising: what that was is in the cause."""

# Java's stack traces, and which of Spark's classes read a checkpoint: https://github.com/apache/spark, branch-4.x,
# sql/core/src/main/scala/org/apache/spark/sql/execution/streaming
_CAUSE = re.compile(r"^(?:Caused by)?: ", re.MULTILINE)  # py4j puts the first of them after a colon
_FRAME = re.compile(r"^\s*at (?:[\w.$@-]+/)*(org\.apache\.spark\.[\w.$]+)", re.MULTILINE)
_ONLY_RAISES = ("org.apache.spark.sql.errors.", "org.apache.spark.SparkException", "org.apache.spark.util.Utils")
_STREAMING = "org.apache.spark.sql.execution.streaming."
_READ_CHECKPOINTS = tuple(_STREAMING + part for part in ("checkpointing.", "state.", "runtime.StreamMetadata"))
_WRITES = re.compile(
    r"(\$anonfun\$)?(do)?(commit|write|add|close|create|upload|rename|delete|maintenance)", re.IGNORECASE
)
_CORRUPT = re.compile(r"corrupt", re.IGNORECASE)
_NO_DAMAGE = re.compile(
    r"java\.io\.(IOException|InterruptedIOException|NotSerializableException)\b|java\.(net|nio\.channels|util\.concurrent)\."
    r"|java\.nio\.file\.(AccessDenied|FileSystem)Exception\b|org\.apache\.hadoop\.security\."
    r"|java\.lang\.(InterruptedException|OutOfMemoryError|ClassNotFoundException|NoClassDefFoundError)\b"
)
"""Beginnings of errors of whoever keeps the files, or of a machine at its limits: the same file may be read later."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a query: one of our own errors, or None for any other; the `reason` is one line.

    `of_checkpoint`: it was raised where Spark reads a checkpoint, by what it found there.
    """

    kind: type[MillstreamError] | None
    reason: str
    of_checkpoint: bool = False

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
    traced = _traced(error)
    of_checkpoint = _is_of_checkpoint(traced)
    if isinstance(error, Py4JJavaError):
        return _failure(None, _explained(java_reason(error), traced), of_checkpoint=of_checkpoint)
    text = str(error)
    for name, reason in reversed(_OUR_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MillstreamError):
            return _failure(kind, reason)
    others = [f"{name.rpartition('.')[2]}: {reason}" for name, reason in _ANY_ERROR.findall(text) if reason]
    reason = others[-1] if others else f"{type(error).__name__}: {text.strip()}"
    return _failure(None, _explained(reason, traced), of_checkpoint=of_checkpoint)


def java_reason(error: Exception) -> str:
    """The first line of what Java says in `error`."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        with suppress(Py4JError, OSError):
            text = error.java_exception.toString()
    return text.strip().partition("\n")[0]


def _traced(error: BaseException) -> str:
    """What Java says of `error` in all, with its causes; "" if it does not come from there."""
    if isinstance(error, Py4JJavaError):
        with suppress(Py4JError, OSError):
            return str(error)
        return ""
    # PySpark shows a query's error without its cause, but has it.
    cause = getattr(error, "_cause", None)
    return "\nCaused by: ".join(trace for one in (error, cause) if (trace := getattr(one, "_stackTrace", None)))


def _is_of_checkpoint(traced: str) -> bool:
    """Whether the innermost cause was raised where Spark reads a checkpoint. What only goes by there is not of it."""
    parts = _CAUSE.split(traced)
    if _NO_DAMAGE.match(parts[-1]) and not _CORRUPT.search(parts[-1].partition("\n")[0]):
        return False
    for part in reversed(parts):
        for frame in _FRAME.findall(part):
            if not frame.startswith(_ONLY_RAISES):
                return frame.startswith(_READ_CHECKPOINTS) and not _WRITES.match(frame.rpartition(".")[2])
    return False


def _explained(reason: str, traced: str) -> str:
    """A reason that tells nothing, with the innermost cause."""
    line = reason.strip().partition("\n")[0].rstrip(".")
    *outer, cause = _CAUSE.split(traced)
    if not outer or not line.endswith(_VAGUE):
        return reason
    return f"{line} ({cause.partition(chr(10))[0].strip()})"


def _failure(kind: type[MillstreamError] | None, reason: str, *, of_checkpoint: bool = False) -> Failure:
    line = reason.strip().partition("\n")[0].rstrip(".")[:_REASON_CHARS]
    hint = " within Spark's 10 seconds: has this machine too much to do?" if line.endswith(_PYTHON_LATE) else ""
    hint = _WRITE_OTHERWISE if _OUTPUT_MODE.search(line) else hint
    return Failure(kind=kind, reason=line + hint, of_checkpoint=of_checkpoint)
