"""OwnerCheck: detects that a newer run has taken over a handler, also while this one has nothing to commit."""

from collections.abc import Sequence

from millstream.delivery.commit_store import CommitStore

_STREAMS_PER_CHECK = 100


class OwnerCheck:
    """Checks the epochs of `streams`, as known at the query's start, against the token of `commit_store`.

    A hundred streams at a time.
    """

    def __init__(self, commit_store: CommitStore, streams: Sequence[str]) -> None:
        self._commit_store = commit_store
        self._streams = streams
        self._next = 0

    def check_next(self) -> None:
        """Check the next streams, from the first again after the last. Raises StaleOwner, RedisError."""
        some = self._streams[self._next : self._next + _STREAMS_PER_CHECK]
        # Before the check: a node that is unavailable must not keep it from the streams of others.
        self._next = self._next + _STREAMS_PER_CHECK if self._next + _STREAMS_PER_CHECK < len(self._streams) else 0
        self._commit_store.check_owner(some)
