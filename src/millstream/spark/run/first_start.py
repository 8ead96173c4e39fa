"""What is checked, and written down in Redis, before a handler's first batch with a new checkpoint."""

from collections.abc import Sequence
from typing import Literal

from millstream.delivery.commit_store import CommitStore
from millstream.errors import ConfigError
from millstream.handlers.handler import Handler
from millstream.model import EntryId
from millstream.redis_client.client import Client, raise_if_error
from millstream.redis_client.key_names import hash_tag

Start = Literal["resume", "from-frontier", "reprocess"]
StartAt = Literal["earliest", "latest"]


def commit_store_of(client: Client, handler: Handler) -> CommitStore:
    """The ledger of `handler`, for its driver."""
    return CommitStore(client, app=handler.app, handler=handler.name, keyed=handler.key is not None)


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
    """Make `handler` ready to begin on `streams` with the new folder `checkpoint`; may be repeated.

    Raises ConfigError if the handler has committed something and `start` does not say what that means; RedisError.
    """
    ledger = commit_store_of(client, handler)
    if start == "reprocess":
        newer = ledger.renewed(ledger.new_token(streams))
        newer.begin(streams)
        newer.forget(streams)
    elif start == "resume":
        for stream in ledger.begun(streams):
            frontier = ledger.frontiers([stream]).get(stream, "the middle of its first batch")
            raise ConfigError(
                f"{handler.label} has processed {stream!r} up to {frontier}, but the checkpoint {checkpoint!r} is "
                "new: use --from-frontier to go on there, --reprocess to forget it and begin anew, or give the old "
                "--checkpoint"
            )
    if start_at == "latest":
        known = ledger.frontiers(streams)
        _begin_at_latest(client, ledger, [stream for stream in streams if stream not in known])


def _begin_at_latest(client: Client, ledger: CommitStore, streams: Sequence[str]) -> None:
    """Write down where each stream ends now: a start that is only looked up would move on if the first batch fails."""
    tails = client.pipeline([("XREVRANGE", stream, "+", "-", "COUNT", 1) for stream in streams])
    ends = {
        stream: EntryId.parse(tail[0][0]) for stream, tail in zip(streams, tails, strict=True) if raise_if_error(tail)
    }
    new = ledger.renewed(ledger.new_token(streams))
    new.begin(list(ends))
    new.advance(ends)
