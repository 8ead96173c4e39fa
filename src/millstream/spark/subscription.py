"""Which streams a query reads."""

from millstream.client import Client
from millstream.clock import Clock
from millstream.errors import ConfigError

_SCAN_INTERVAL_MS = 1000.0
_SCAN_SHARE = 20.0  # looking among 100,000 keys takes the time that planning may take


class Subscription:
    """The streams that are listed, or those that match a glob pattern now, looked up at most once a second, and less often
    the longer that takes.
    """

    def __init__(self, client: Client, listed: tuple[str, ...], pattern: str | None, *, clock: Clock) -> None:
        self.pattern = pattern
        self._client = client
        self._names = list(listed)
        self._clock = clock
        self._scan_due_ms = float("-inf")

    def names(self) -> list[str]:
        """Their names; listed ones need not exist. Raises ConfigError for a name that is not text."""
        if self.pattern is not None and self._clock.monotonic_ms() >= self._scan_due_ms:
            began_ms = self._clock.monotonic_ms()
            self._names = self._client.scan_streams(self.pattern)
            ended_ms = self._clock.monotonic_ms()
            self._scan_due_ms = ended_ms + max(_SCAN_INTERVAL_MS, (ended_ms - began_ms) * _SCAN_SHARE)
            for name in self._names:
                if any("\udc80" <= char <= "\udcff" for char in name):  # how Python writes bytes that are no text
                    raise ConfigError(f"the stream name {name!r} is not UTF-8 text: use a pattern that leaves it out")
        return self._names
