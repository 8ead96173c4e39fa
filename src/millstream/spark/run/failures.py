"""Failure: why a query ended, in one line, and whether a restart or a new checkpoint can fix it."""

import re
from contextlib import suppress
from dataclasses import dataclass

from py4j.protocol import Py4JError, Py4JJavaError

from millstream import errors
from millstream.errors import AccessDenied, BatchBehind, ConfigError, DataLoss, MillstreamError, StaleOwner, WrongType
from millstream.spark.versions import CHECKPOINT_READERS

_FINAL = (StaleOwner, DataLoss, ConfigError, AccessDenied, WrongType)
_OUR_ERROR = re.compile(r"millstream\.errors\.(\w+): (.*)")
_ANY_ERROR = re.compile(r"^[\s|]*(?:Caused by: )?((?:\w+\.)*\w*(?:Error|Exception)): (.*)", re.MULTILINE)
_REASON_CHARS = 500
_OUTPUT_MODE = re.compile(r"redis-streams does not support (Update|Complete) mode$")
_USE_APPEND = ": use the mode append, with a watermark if rows are summed up, or write in foreachBatch"
_PYTHON_LATE = "Python worker failed to connect back"
_VAGUE = ("Task not serializable", "Task serialization failed")
"""Spark's text for every serialization error; the innermost cause names the object that could not be serialized."""

# Java's stack traces
_CAUSE = re.compile(r"^(?:Caused by)?: ", re.MULTILINE)  # py4j writes the first after a colon
_FRAME = re.compile(r"^\s*at (?:[\w.$@-]+/)*(org\.apache\.spark\.[\w.$]+)", re.MULTILINE)
_ONLY_RAISES = ("org.apache.spark.sql.errors.", "org.apache.spark.SparkException", "org.apache.spark.util.Utils")
_WRITES = re.compile(
    r"(\$anonfun\$)?(do)?(commit|write|add|close|create|upload|rename|delete|maintenance)", re.IGNORECASE
)
_CORRUPT = re.compile(r"corrupt", re.IGNORECASE)
_NO_DAMAGE = re.compile(
    r"java\.io\.(IOException|InterruptedIOException|NotSerializableException)\b|java\.(net|nio\.channels|util\.concurrent)\."
    r"|java\.nio\.file\.(AccessDenied|FileSystem)Exception\b|org\.apache\.hadoop\.security\."
    r"|java\.lang\.(InterruptedException|OutOfMemoryError|ClassNotFoundException|NoClassDefFoundError)\b"
)
"""Errors of the file system, or of an overloaded machine: the same file may be readable later."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a query ended. `kind`: an error of millstream, or None for any other; `reason`: one line.

    `in_checkpoint`: raised where Spark reads a checkpoint, because of its content.
    """

    kind: type[MillstreamError] | None
    reason: str
    in_checkpoint: bool = False

    @property
    def is_final(self) -> bool:
        """Whether an operator has to change something first."""
        return (self.kind is not None and issubclass(self.kind, _FINAL)) or _USE_APPEND in self.reason

    @property
    def is_behind(self) -> bool:
        """Whether another run may have moved the checkpoint on after the query had read it."""
        return self.kind is BatchBehind

    @property
    def is_worker_late(self) -> bool:
        """Whether a Python process did not start within Spark's ten seconds, which no setting changes."""
        return _PYTHON_LATE in self.reason


def failure_of(error: BaseException) -> Failure:
    """Classify `error`: raised on the driver, or reported by Spark as text from an executor or a planner."""
    if isinstance(error, MillstreamError):
        return _failure(type(error), str(error))
    trace = _java_trace(error)
    in_checkpoint = _is_raised_in_checkpoint(trace)
    if isinstance(error, Py4JJavaError):
        return _failure(None, _with_cause(java_reason(error), trace), in_checkpoint=in_checkpoint)
    text = str(error)
    for name, reason in reversed(_OUR_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, MillstreamError):
            return _failure(kind, reason)
    others = [f"{name.rpartition('.')[2]}: {reason}" for name, reason in _ANY_ERROR.findall(text) if reason]
    reason = others[-1] if others else f"{type(error).__name__}: {text.strip()}"
    return _failure(None, _with_cause(reason, trace), in_checkpoint=in_checkpoint)


def java_reason(error: Exception) -> str:
    """Return the first line of the Java exception's text in `error`."""
    text = str(error)
    if isinstance(error, Py4JJavaError):
        with suppress(Py4JError, OSError):
            text = error.java_exception.toString()
    return text.strip().partition("\n")[0]


def _java_trace(error: BaseException) -> str:
    """Return the Java stack trace of `error`, with its causes; "" if it is not from Java."""
    if isinstance(error, Py4JJavaError):
        with suppress(Py4JError, OSError):
            return str(error)
        return ""
    # PySpark prints a query's error without its cause, but keeps it.
    cause = getattr(error, "_cause", None)
    return "\nCaused by: ".join(trace for one in (error, cause) if (trace := getattr(one, "_stackTrace", None)))


def _is_raised_in_checkpoint(trace: str) -> bool:
    """Whether the innermost cause was raised where Spark reads a checkpoint, and not merely passed through there."""
    parts = _CAUSE.split(trace)
    if _NO_DAMAGE.match(parts[-1]) and not _CORRUPT.search(parts[-1].partition("\n")[0]):
        return False
    for part in reversed(parts):
        for frame in _FRAME.findall(part):
            if not frame.startswith(_ONLY_RAISES):
                return frame.startswith(CHECKPOINT_READERS) and not _WRITES.match(frame.rpartition(".")[2])
    return False


def _with_cause(reason: str, trace: str) -> str:
    """Append the innermost cause to a vague reason."""
    line = reason.strip().partition("\n")[0].rstrip(".")
    *outer, cause = _CAUSE.split(trace)
    if not outer or not line.endswith(_VAGUE):
        return reason
    return f"{line} ({cause.partition(chr(10))[0].strip()})"


def _failure(kind: type[MillstreamError] | None, reason: str, *, in_checkpoint: bool = False) -> Failure:
    line = reason.strip().partition("\n")[0].rstrip(".")[:_REASON_CHARS]
    hint = " within Spark's 10 seconds: is this machine overloaded?" if line.endswith(_PYTHON_LATE) else ""
    hint = _USE_APPEND if _OUTPUT_MODE.search(line) else hint
    return Failure(kind=kind, reason=line + hint, in_checkpoint=in_checkpoint)
