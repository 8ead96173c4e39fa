"""Everything that a sink does in Redis, for the tests of access rights."""

from typing import Any

from millstream.errors import DataLoss
from millstream.redis_client.client import Client
from millstream.spark.sink import Publication, Stage, StagedTask, WriteOptions, begin, token_of
from millstream.spark.sink.upserts import upsert


def write_batches(url: str, admin: Client) -> None:
    """Two runs: one that dies, and one that sweeps up after it and publishes."""
    with Client(url) as client:
        terms = WriteOptions(maxlen=100, overwrite=True)
        publication = Publication(client, "query", terms, patience_ms=0)
        share_of(client, "dead", 0)
        shares = [share_of(client, "next", 0)]
        assert publication.publish(shares, batch=0, epoch=shares[0].epoch)
        shares = [share_of(client, "next", 1)]
        assert publication.withdraw(shares)
        shares = [share_of(client, "next", 1)]
        admin.execute("UNLINK", *admin.execute("KEYS", "millstream:*:sink:*.*"))
        try:
            publication.publish(shares, batch=1, epoch=shares[0].epoch)
        except DataLoss:
            publication.discard(shares)
        assert admin.execute("XLEN", "orders") == 1
        for guard, older in (("5", 0), ("4", 1)):
            row: Any = ("orders:1", guard, (1, "gone", "n", "1"))
            assert upsert(client, "hash", "g", [row], patience_ms=0) == older
            text: Any = ("orders:2", guard, (f'{{"g":"{guard}"}}',))
            assert upsert(client, "json", "g", [text], patience_ms=0) == older


def share_of(client: Client, run: str, batch: int) -> StagedTask:
    epoch = begin(client, "query", run)
    stage = Stage(client, "query", token_of(epoch, batch, 0, 1), patience_ms=0)
    stage.add([("orders", [(f"5-{batch + 1}", "n", "1")])], 10)
    return stage.finish(0, epoch)
