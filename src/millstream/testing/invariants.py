"""The invariants of key queues, to check in a test after each operation that could break them."""

from collections import Counter

from millstream.model import EntryId
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import WAITING, HandlerKeys
from millstream.redis_client.replies import mapping_of


def check_invariants(client: Client, keys: HandlerKeys, stream: str) -> list[str]:
    """Return the violated invariants of the key queues of a stream that nothing else changes meanwhile.

    1. a key queue with entries is in exactly one of ready, leased, backing off and parked (or leased and parked)
    2. owners and leases name the same queues
    3. an id is in a key queue if and only if it is pending, with the queue's owner or with the consumer WAITING
    4. the ids of a key queue grow
    5. lease tokens are distinct, and none is above the fence
    6. nothing empty is ready, backing off or counted
    """
    wrong: list[str] = []
    ready = client.execute("LRANGE", keys.ready, 0, -1)
    owners = mapping_of(client.execute("HGETALL", keys.owners))
    leases = set(client.execute("ZRANGE", keys.leases, 0, -1))
    backoff = set(client.execute("ZRANGE", keys.backoff, 0, -1))
    parked = set(client.execute("HKEYS", keys.parked))
    prefix, suffix = len(keys.queue(b"")) - len(b":queue"), len(b":queue")
    queues: dict[bytes, list[bytes]] = {}
    cursor = b"0"
    while True:
        cursor, found = client.execute("SCAN", cursor, "MATCH", keys.queue(b"*"), "COUNT", 1_000)
        queues |= {key[prefix:-suffix]: client.execute("LRANGE", key, 0, -1) for key in found}
        if cursor == b"0":
            break
    places = Counter(ready) + Counter(backoff) + Counter(owners.keys())
    for name in {*queues, *places}:
        if places[name] != 1 and not (places[name] == 0 and name in parked):
            wrong.append(f"key queue {name!r} is in {places[name]} places")
        if name not in queues and name not in owners:
            wrong.append(f"key queue {name!r} has no entries and still exists")
        if name in parked and name in (*ready, *backoff):
            wrong.append(f"key queue {name!r} is parked and can be leased")
    if owners.keys() != leases:
        wrong.append(f"owners and leases differ: {owners.keys() ^ leases}")
    fence = int(client.execute("HGET", keys.meta, "fence") or 0)
    fences = [int(token.split()[0]) for token in owners.values()]
    if len(set(fences)) != len(fences) or any(one >= fence for one in fences):
        wrong.append(f"lease tokens {fences} under the fence {fence}")
    pending = {one: name for one, name, *_ in client.execute("XPENDING", stream, keys.group, "-", "+", 1_000_000)}
    queued = {one for ids in queues.values() for one in ids}
    if queued != pending.keys():
        wrong.append(f"queued but not pending: {queued - pending.keys()}; the reverse: {pending.keys() - queued}")
    for name, ids in queues.items():
        if ids != sorted(set(ids), key=EntryId.parse):
            wrong.append(f"key queue {name!r} is out of order: {ids}")
        expected_consumer = owners[name].split(b" ", 2)[2] if name in owners else WAITING.encode()
        wrong += [
            f"{one!r} of {name!r} is pending with {pending[one]!r}"
            for one in ids
            if one in pending and pending[one] not in (expected_consumer, WAITING.encode())
        ]
    counted = {field.rstrip(b"flaecs") for field in client.execute("HKEYS", keys.crashes)}
    if counted - queued:
        wrong.append(f"crash counts of entries that are done: {counted - queued}")
    return wrong
