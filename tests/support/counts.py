"""Numbered messages that a handler counts by key, in its state: its outputs show what was lost, doubled or reordered."""

from itertools import zip_longest

from millstream.redis_client.client import Client

KEY_COUNT = 20


def publish_numbers(client: Client, stream: str, first: int, count: int) -> None:
    """Publish `count` messages from the number `first` on: the key of the n-th is n modulo KEY_COUNT."""
    numbers = range(first, first + count)
    client.pipeline([("XADD", stream, "*", "k", n % KEY_COUNT, "n", n) for n in numbers])


def check_counts(client: Client, stream: str, published: int) -> None:
    """Each message of each key had its output once, in order, on the state that the one before had left."""
    found: dict[int, list[tuple[int, int]]] = {}
    for _, (_, key, _, n, _, count) in client.execute("XRANGE", stream, "-", "+"):
        found.setdefault(int(key), []).append((int(n), int(count)))
    for key in range(min(KEY_COUNT, published)):
        expected = [(n, at) for at, n in enumerate(range(key, published, KEY_COUNT), 1)]
        outputs = found.pop(key, [])
        wrong = [(output, wanted) for output, wanted in zip_longest(outputs, expected) if output != wanted]
        assert not wrong, f"key {key}: {len(wrong)} outputs (number, count) are not the expected ones: {wrong[:5]}"
    assert not found, f"outputs of keys without a message: {found}"
