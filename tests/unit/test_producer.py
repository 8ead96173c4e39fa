"""What a producer refuses before it asks Redis, and the names of what it keeps there."""

import pickle

import pytest

from millstream.errors import ConfigError, NotReplicated, OutputError, RedisError, StreamFull, Unavailable
from millstream.producer.producer import Producer
from millstream.producer.session import MAX_FIELDS, Batch, PublishOptions
from millstream.redis_client.key_names import StreamKeys, hash_tag

pytestmark = [pytest.mark.cli]

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("stream", ["s", "a:b", "{tag}s", "s{tag}"])
def test_every_key_of_a_stream_is_in_its_hash_slot(stream: str) -> None:
    keys = StreamKeys(stream)
    for key in (keys.due, keys.delayed, keys.producer("ab"), keys.dedupe(b"order:17")):
        assert hash_tag(key) == hash_tag(stream)
        assert key.startswith("millstream:")


def test_different_dedupe_ids_have_different_keys_that_do_not_show_them() -> None:
    keys = StreamKeys("s")
    assert keys.dedupe(b"jo@example.org") != keys.dedupe(b"ja@example.org")
    assert "example" not in keys.dedupe(b"jo@example.org")
    assert len(keys.dedupe(b"x" * 10_000)) < 100


@pytest.mark.parametrize("values", [{"delay_ms": -1}, {"delay_ms": 1e15}, {"delay_ms": float("nan")}, {"replicas": -1}])
def test_publish_options_that_make_no_sense_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PublishOptions(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{"capacity": 0}, {"dedupe_window_ms": 0}])
def test_a_producer_that_makes_no_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Producer(NOWHERE, **values)  # type: ignore[arg-type]


def test_a_stream_whose_slot_no_other_key_can_share_is_refused() -> None:
    with Producer(NOWHERE) as producer, pytest.raises(ConfigError, match="cannot be used"):
        producer.publish("a}b", {"n": 1})


def test_dedupe_ids_must_be_as_many_as_the_messages() -> None:
    with Producer(NOWHERE) as producer, pytest.raises(ConfigError, match="2 messages have 1 dedupe_ids"):
        producer.publish_many("s", ({"n": n} for n in range(2)), dedupe_ids=["a"])


def test_field_names_are_sent_once_per_run_of_messages() -> None:
    batch = Batch()
    for names, values in ((("a", "b"), ("1", "2")), (("a", "b"), ("3", "4")), (("c",), ("5",))):
        batch.add(names, values)
    assert batch.args() == [2, 2, "a", "b", "1", "2", "3", "4", 1, 1, "c", "5"]
    assert (batch.entries, batch.size) == (3, 10)
    for fields in (0, MAX_FIELDS + 1):
        with pytest.raises(OutputError):
            batch.add(("x",) * fields, ("y",) * fields)
    assert batch.entries == 3


def test_a_full_stream_is_an_unavailable_error_and_a_missing_replica_is_not() -> None:
    assert issubclass(StreamFull, Unavailable)
    assert issubclass(NotReplicated, RedisError)
    assert not issubclass(NotReplicated, Unavailable)
    again = pickle.loads(pickle.dumps(NotReplicated("only 0 of 1", ["1-0"])))
    assert (str(again), again.ids) == ("only 0 of 1", ["1-0"])
