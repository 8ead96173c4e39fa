"""LastError: why the last attempt on the first entry of a key queue failed, stored beside its number of attempts."""

from dataclasses import dataclass

from millstream.handlers.attempt import Parked, RetryLater, traceback_of
from millstream.redis_client.escaping import escape_line
from millstream.redis_client.redaction import redact_text

_MAX_ERROR_BYTES, _MAX_TRACEBACK_BYTES = 300, 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class LastError:
    """The error of an attempt, in one line, and its traceback; "" where there is none."""

    error: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, outcome: RetryLater | Parked) -> "LastError":
        """Return the error of a failed attempt."""
        if isinstance(outcome, Parked):
            return cls(error=f"{outcome.reason}: {outcome.error}", traceback=outcome.traceback)
        return cls(error=outcome.error, traceback=traceback_of(outcome.raised))

    def pack(self) -> bytes:
        """Return it as stored in Redis: bounded, and without passwords in URLs."""
        error = escape_line(redact_text(self.error)).encode("utf-8", "backslashreplace")
        traceback = redact_text(self.traceback).encode("utf-8", "backslashreplace")
        if len(error) > _MAX_ERROR_BYTES:
            error = error[: _MAX_ERROR_BYTES - 3] + b"..."
        if len(traceback) > _MAX_TRACEBACK_BYTES:  # its end tells more than its beginning
            traceback = b"..." + traceback[-_MAX_TRACEBACK_BYTES + 3 :]
        return error + b"\n" + traceback if traceback else error

    @classmethod
    def parse(cls, packed: bytes | None) -> "LastError":
        """Parse what `pack` returned; any client may have written something else."""
        error, _, traceback = (packed or b"").decode("utf-8", "replace").partition("\n")
        return cls(error=error, traceback=traceback)
