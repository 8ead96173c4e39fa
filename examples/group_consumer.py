"""The example consumer of the consumer-groups specification: group_consumer.py URL MYNAME [LOST_AFTER_MS]."""

import sys

from millstream.groups import Delivered, Reader, ReadPolicy
from millstream.redis_client import Client


def process(message: Delivered) -> None:
    """Process a message; an exception or a crash before the acknowledgement leaves it pending."""
    sys.stdout.write(f"{message.id.decode()} {message.fields}\n")
    sys.stdout.flush()


def main(url: str, myname: str, lost_after_ms: str = "60000") -> None:
    """Process messages that are still pending, then new ones, and idle ones claimed from other consumers."""
    client, policy = Client(url), ReadPolicy(claim_after_ms=int(lost_after_ms))
    with Reader(client, group="mygroup", consumer=myname, streams=["mystream"], policy=policy) as reader:
        for batch in reader:
            for message in batch:
                process(message)
                reader.ack(batch.stream, [message.id])


if __name__ == "__main__":
    main(*sys.argv[1:])
