"""Bad input of every kind is processed, a dead letter, or a clear error; nothing is lost and the pipeline lives."""

import os
from dataclasses import dataclass

import pytest

from millstream import App, Message, State
from tests.support.pipelines import Pipelines

pytestmark = [pytest.mark.spark]
MANY_KEYS = 1_000_000 if os.environ.get("MILLSTREAM_SOAK") else 30_000


@dataclass
class Reading:
    """A typed message."""

    sensor: str
    value: float
    note: str | None = None


def reading_app() -> App:
    app = App("app")

    @app.handler("in", key="sensor", into="out")
    def read(reading: Reading) -> dict[str, object]:
        return {"sensor": reading.sensor, "value": reading.value}

    return app


GOOD: list[str | bytes] = ["sensor", "a", "value", "1.5"]
UNDECODABLE: dict[str, list[str | bytes]] = {
    "invalid UTF-8 in a text field": ["sensor", b"\xff\xfe", "value", "1"],
    "a missing field": ["sensor", "a"],
    "an empty number": ["sensor", "a", "value", ""],
    "not a number": ["sensor", "a", "value", "one"],
    "NaN": ["sensor", "a", "value", "nan"],
    "a duplicate field that is wanted": ["sensor", "a", "value", "1", "value", "2"],
    "a null byte in a number": ["sensor", "a", "value", "1\x00"],
}
FINE: dict[str, list[str | bytes]] = {
    "binary fields beside": [*GOOD, b"\x00\xff", b"\x80" * 100],
    "a megabyte beside": [*GOOD, "blob", b"x" * (1 << 20)],
    "a duplicate field that nobody wants": [*GOOD, "other", "1", "other", "2"],
    "an empty field name": [*GOOD, "", ""],
    "an empty optional": [*GOOD, "note", ""],
    "five hundred fields": [*GOOD, *(f"f{n}" for n in range(1000))],
}
KEYLESS: dict[str, list[str | bytes]] = {"no key": ["value", "1"], "an empty key": ["sensor", "", "value", "1"]}


def test_every_kind_of_bad_entry_is_processed_or_a_dead_letter_with_its_bytes(pipelines: Pipelines) -> None:
    entries = [*UNDECODABLE.values(), *FINE.values(), *KEYLESS.values()]
    ids = pipelines.add("in", *entries)
    pipelines.once(reading_app())
    letters = pipelines.dead("app", "read", "in")
    reasons = {letter.id: letter.reason for letter in letters}
    expected = dict(zip(ids, ["undecodable"] * len(UNDECODABLE) + [""] * len(FINE) + ["missing-key"] * 2, strict=True))
    assert reasons == {entry_id: reason for entry_id, reason in expected.items() if reason}
    assert len(pipelines.entries("out")) == len(FINE)
    originals = dict(zip(ids, entries, strict=True))
    for letter in letters:
        flat = [part if isinstance(part, bytes) else part.encode() for part in originals[letter.id]]
        assert letter.pairs == flat
    assert pipelines.meta("app", "read", "in")["committed"] == str(len(entries))


def test_a_handler_of_plain_messages_sees_binary_keys_and_fields_byte_for_byte(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="k", into="out")
    def echo(message: Message, state: State) -> dict[bytes, bytes]:
        state["blob"] = message.pairs[3]
        return {message.pairs[2]: message.pairs[3], b"key": message.key or b""}

    awkward = bytes(range(256))
    pipelines.add("in", [b"k", awkward, b"\x00name", awkward * 4])
    pipelines.once(app)
    ((_, items),) = pipelines.client.execute("XRANGE", "out", "-", "+")
    assert items == [b"\x00name", awkward * 4, b"key", awkward]


def test_many_keys_in_one_batch_are_each_processed_once(pipelines: Pipelines) -> None:
    app = App("app")

    @app.handler("in", key="k")
    def count(message: Message, state: State) -> None:
        state["n"] = state.get("n", 0) + 1

    for start in range(0, MANY_KEYS, 10_000):
        pipelines.add("in", *({"k": f"key-{n}"} for n in range(start, start + 10_000)))
    pipelines.once(app, max_per_batch=MANY_KEYS)
    assert pipelines.meta("app", "count", "in")["committed"] == str(MANY_KEYS)
    assert pipelines.client.execute("HLEN", "millstream:{in}:in:app.count:state") == MANY_KEYS
    assert pipelines.state("app", "count", "in", "key-77") == {"n": 1}
