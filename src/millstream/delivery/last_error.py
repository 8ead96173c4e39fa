"""LastError: why the last attempt on the first entry of a key queue failed, stored beside its number of attempts."""

import re

import msgspec

from millstream.handlers.attempt import Parked, RetryLater, traceback_of
from millstream.model import Retry
from millstream.redis_client.escaping import escape_line
from millstream.redis_client.redaction import redact_text

_MAX_ERROR_BYTES, _MAX_TRACEBACK_BYTES = 300, 4_096
_ATTEMPTS = re.compile(r"of (\d{1,9})(, then it blocks)?")


class LastError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of an attempt, in one line, and its traceback; "" where there is none.

    * `attempts`: how many the retry policy grants; 0 if that is not known, or if none was made: the entry waits for
      newer code
    * `blocks`: True if it retries without end after these
    """

    error: str = ""
    traceback: str = ""
    attempts: int = 0
    blocks: bool = False

    @classmethod
    def of(cls, failed: RetryLater | Parked | str, retry: Retry) -> "LastError":
        """Return the error of a failed attempt, its outcome or a consumer's text, under this retry policy."""
        if isinstance(failed, RetryLater) and failed.waits:
            return cls(error=failed.error, blocks=True)
        error, traceback = (failed, "") if isinstance(failed, str) else (failed.error, _traceback_of(failed))
        return cls(error=error, traceback=traceback, attempts=retry.attempts, blocks=retry.then == "block")

    def pack(self) -> bytes:
        """Return it as stored in Redis: bounded, and without passwords in URLs."""
        error = escape_line(redact_text(self.error)).encode("utf-8", "backslashreplace")
        traceback = redact_text(self.traceback).encode("utf-8", "backslashreplace")
        if len(error) > _MAX_ERROR_BYTES:
            error = error[: _MAX_ERROR_BYTES - 3] + b"..."
        if len(traceback) > _MAX_TRACEBACK_BYTES:  # its end has the error
            traceback = b"..." + traceback[-_MAX_TRACEBACK_BYTES + 3 :]
        if self.attempts or self.blocks:  # an escaped line has no tab
            error += f"\tof {self.attempts}{', then it blocks' if self.blocks else ''}".encode()
        return error + b"\n" + traceback if traceback else error

    @classmethod
    def parse(cls, packed: bytes | None) -> "LastError":
        """Parse what `pack` returned; any client may have written something else."""
        line, _, traceback = (packed or b"").decode("utf-8", "replace").partition("\n")
        error, _, attempts = line.rpartition("\t")
        policy = _ATTEMPTS.fullmatch(attempts)
        if policy is None:
            return cls(error=line, traceback=traceback)
        return cls(error=error, traceback=traceback, attempts=int(policy[1]), blocks=policy[2] is not None)


def _traceback_of(outcome: RetryLater | Parked) -> str:
    return outcome.traceback if isinstance(outcome, Parked) else traceback_of(outcome.raised)
