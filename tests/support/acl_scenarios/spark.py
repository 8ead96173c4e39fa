"""What a run on Spark does in Redis beside its batches: lines of what was set aside, and keys that move."""

import threading
import time
from collections import defaultdict

from millstream import App
from millstream.aside import Aside, read_line, ready_lines, set_aside, waiting_keys
from millstream.client import Client
from millstream.ledger import IN_LINE, Ledger, Unit
from millstream.naming import REDRIVE_FIELD, HandlerKeys
from millstream.partitions import Partitions
from millstream.spark.moving import PartitionMoves, keep_moving
from tests.support.partition_fixtures import BASE, Publisher, moved_key


def keep_lines(client: Client, admin: Client, keys: HandlerKeys) -> None:
    """Set messages aside, look which may run, run one line to its end, and park another."""
    ids = [one.decode() for one in admin.pipeline([("XADD", keys.stream, "*", "n", n) for n in range(4)])]
    ledger = Ledger(client, app=keys.app, handler=keys.handler, keyed=True)
    ledger = ledger.renewed(ledger.new_token([keys.stream]))
    ledger.begin([keys.stream])
    asides = [Aside(line=line, expected=b"", how="later", detail=0, failed=1, ids=some)
              for line, some in ((b"kX", ids[:2]), (b"kY", ids[2:]))]  # fmt: skip
    assert set_aside(ledger, keys.stream, asides) == []
    assert waiting_keys(ledger, keys.stream, [b"kX", b"kZ"]) == {b"kX"}
    time.sleep(0.005)
    assert sorted(ready_lines(ledger, [keys.stream], 10)[keys.stream].lines) == [b"kX", b"kY"]
    assert [one for one, _ in read_line(client, keys, b"kX", 10).entries] == ids[:2]
    unit = Unit(b"kX", IN_LINE)
    for one in ids[:2]:
        unit.cover(one)
    assert ledger.commit({keys.stream: [unit]}) == []
    parked = Aside(line=b"kY", expected=IN_LINE, how="park", detail="why", failed=2, ids=ids[2:3])
    assert set_aside(ledger, keys.stream, [parked]) == []
    assert ready_lines(ledger, [keys.stream], 10)[keys.stream].lines == []


def move_keys(client: Client, admin: Client, app: str, handler: str) -> None:
    """Have a key wait in a new partition until its old one is done, and send a dead letter on."""
    made = App(app)
    made.handler(BASE, name=handler, key="k", partitions=2)(lambda message: None)
    compiled = made.handlers[handler]
    publisher = Publisher(admin)
    old = Partitions(admin, BASE).made(2)
    key = moved_key(old, 4)
    publisher.publish(defaultdict(list), key)
    layout = Partitions(admin, BASE).grow(4)
    ledger = Ledger(client, app=app, handler=handler, keyed=True)
    ledger = ledger.renewed(ledger.new_token(layout.streams))
    ledger.begin(layout.streams)
    home = layout.stream(layout.place(key.encode()))
    moves = PartitionMoves(client, compiled)
    moves.expect(home, [b"k" + key.encode()])
    new = admin.execute("XADD", home, "*", "k", key).decode()
    assert set_aside(ledger, home, [Aside(line=b"k" + key.encode(), expected=b"", ids=[new])]) == []
    pairs = [REDRIVE_FIELD, f"{app}.{handler}".encode(), b"k", key.encode()]
    assert moves.send_on(old.stream(old.place(key.encode())), key.encode(), "1-0", pairs)
    for stream in old.streams:
        last = admin.execute("XREVRANGE", stream, "+", "-", "COUNT", 1)
        admin.execute("HSET", HandlerKeys(app, handler, stream).meta, "frontier", last[0][0] if last else "0-0")
        admin.execute("HSET", HandlerKeys(app, handler, stream).state, key, b"\x80")
    over = threading.Event()
    keep_moving(client, compiled, over, lambda streams: over.set())
