"""First start of a handler with a new checkpoint: the checks, and the start position recorded in Redis."""

from collections.abc import Sequence
from typing import Literal

from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import hash_tag

Start = Literal["resume", "from-committed", "reprocess"]
StartAt = Literal["earliest", "latest"]


def commit_store_of(client: Client, handler: Handler) -> CommitStore:
    """Return the commit store of `handler`, for its driver."""
    return CommitStore(
        client,
        app=handler.app,
        handler=handler.name,
        keyed=handler.key is not None,
        state_ttl_ms=handler.state_ttl_ms,
    )


def check_slots(handler: Handler, streams: Sequence[str]) -> None:
    """Raise ConfigError if, on Redis Cluster, the handler's output stream is not in the slot of each of `streams`."""
    for stream in streams:
        if handler.into and hash_tag(stream) != hash_tag(handler.into):
            raise ConfigError(
                f"{handler.label}: on Redis Cluster into={handler.into!r} must share the hash slot of "
                f"{stream!r}; name it like '{{{hash_tag(stream)}}}{handler.into}'"
            )


def prepare_new(
    client: Client, handler: Handler, streams: Sequence[str], checkpoint: str, *, start: Start, start_at: StartAt
) -> None:
    """Prepare `handler` to start on `streams` with the new folder `checkpoint`; repeatable.

    Raises ConfigError if the handler has committed messages and `start` is "resume"; RedisError.
    """
    commit_store = commit_store_of(client, handler)
    if start == "reprocess":
        newer = commit_store.with_token(commit_store.new_token(streams))
        newer.begin_run(streams)
        newer.drop_progress(streams)
    elif start == "resume":
        for stream in commit_store.begun_streams(streams):
            committed_id = commit_store.committed_ids([stream]).get(stream, "the middle of its first batch")
            raise ConfigError(
                f"{handler.label} has processed {stream!r} up to {committed_id}, but the checkpoint {checkpoint!r} is "
                "new: use --from-committed to continue there, --reprocess to delete its progress and start from the "
                "beginning, or give the old --checkpoint"
            )
    if start_at == "latest":
        known = commit_store.committed_ids(streams)
        _start_at_latest(client, commit_store, [stream for stream in streams if stream not in known])


def _start_at_latest(client: Client, commit_store: CommitStore, streams: Sequence[str]) -> None:
    """Commit the current end of each stream: otherwise the start position would move if the first batch failed."""
    tails = client.pipeline([("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams])
    ends = {
        stream: EntryId.parse(tail[0][0]) for stream, tail in zip(streams, tails, strict=True) if raise_if_error(tail)
    }
    newer = commit_store.with_token(commit_store.new_token(streams))
    newer.begin_run(list(ends))
    newer.advance_committed(ends)
