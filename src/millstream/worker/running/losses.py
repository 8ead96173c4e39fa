"""Losses: how often a message may be lost with its process before it is run in isolation, and how often after that.

`millstream replay` imports it too, so it imports no Redis client.
"""

from dataclasses import replace

from millstream.model import Retry

_MOST_LOSSES = 2
_LEAST_DEATHS = 2
_MAX_LOSS_DELAY_MS = 1_000.0


def isolated_after(retry: Retry) -> int:
    """Return after how many expired leases, or deliveries without an outcome, a message is run in isolation.

    Before that, another message may have been the reason, or none. The fewer attempts, the sooner.
    """
    return max(1, min(_MOST_LOSSES, retry.attempts - _LEAST_DEATHS))


def crashes_allowed(retry: Retry) -> int:
    """Return how many processes may crash on a message in isolation: at least two, as one may be chance."""
    return max(_LEAST_DEATHS, retry.attempts - _MOST_LOSSES)


def loss_retry(retry: Retry) -> Retry:
    """Return the back-off of a message whose process was lost with it, before it is run in isolation.

    Other messages go on meanwhile, should it end process after process. It is short: most losses are chance, and then
    all that the process had in flight waits.
    """
    return replace(
        retry,
        delay_ms=min(retry.delay_ms, _MAX_LOSS_DELAY_MS),
        max_delay_ms=min(retry.max_delay_ms, _MAX_LOSS_DELAY_MS),
    )
