"""Every operation of a Spark program that reads states, for the tests of access rights."""

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.spark.source.state_options import parse_state_options
from millstream.spark.source.state_provider import RedisStateReader

EXPIRING = b"\xc1%d \x80" % 10**14
"""A state as a server without HPEXPIRE has it. It expires in the year 5138."""


def read_states(url: str, admin: Client) -> None:
    """Of a handler on two streams, which a scan finds."""
    for stream in ("orders", "orders:2"):
        admin.execute("HSET", HandlerKeys("shop", "bill", stream).state, "k", b"\x80", "l", EXPIRING)
    options = parse_state_options({"url": url, "handler": "shop.bill"}, {})
    reader = RedisStateReader(options, options.schema)
    assert sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task)) == 4
