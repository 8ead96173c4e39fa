"""The options of the Spark source: what they mean, and what is said about wrong ones."""

import pytest

from millstream.errors import ConfigError
from millstream.model import ZERO_ID, EntryId
from millstream.redis_client import DEFAULT_URL
from millstream.spark.source.offset_bounds import OffsetBounds, Timestamp
from millstream.spark.source.options import Columns, Limits, Sharing, SourceOptions, parse

pytestmark = [pytest.mark.spark]

URL = "redis://127.0.0.1:6379/0"


def options(**given: str) -> SourceOptions:
    return parse({"url": URL, "subscribe": "orders", **given}, {})


def test_names_of_options_are_read_in_any_case() -> None:
    found = parse({"URL": URL, "SUBSCRIBE": "a, b,a", "maxoffsetspertrigger": "7", "FailOnDataLoss": "False"}, {})
    assert (found.url, found.streams, found.limits.max_per_trigger, found.fail_on_data_loss) == (
        URL,
        ("a", "b"),
        7,
        False,
    )


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert options() == SourceOptions(url=URL, streams=("orders",))
    assert options().group is None


def test_a_streaming_query_names_its_progress_group_or_says_that_it_has_none() -> None:
    with pytest.raises(ConfigError, match=r'name one by option\("group", NAME\), for each query of a stream another'):
        options().check_streaming()
    options().check_batch()
    for group in ("mine", ""):
        found = options(group=group)
        found.check_streaming()
        assert found.group == group


def test_without_an_option_the_url_is_that_of_the_environment_or_the_default_one() -> None:
    elsewhere = {"MILLSTREAM_URL": "redis://elsewhere:1/0"}
    assert parse({"subscribe": "a"}, elsewhere).url == "redis://elsewhere:1/0"
    assert parse({"subscribe": "a", "url": URL}, elsewhere).url == URL
    assert parse({"subscribe": "a"}, {}).url == parse({"subscribe": "a"}, {"MILLSTREAM_URL": ""}).url == DEFAULT_URL


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"subscirbe": "x"}, "'subscirbe' is unknown to redis-streams; did you mean 'subscribe'?"),
        ({"maxOffsetPerTrigger": "1"}, "did you mean 'maxOffsetsPerTrigger'?"),
        ({"colour": "red"}, "the options for reading are url, subscribe"),
        ({"path": "x"}, "load() takes no path"),
        ({"subscribePattern": "a*"}, "not by both"),
        ({"subscribe": " , "}, "names no stream"),
        ({"subscribe": ""}, "option subscribe is empty"),
        ({"maxOffsetsPerTrigger": "0"}, "must be a whole number of 1 or more"),
        ({"minPartitions": "two"}, "must be a whole number of 1 or more"),
        ({"maxOffsetsPerTrigger": str(2**63)}, "must be a whole number of 1 or more, up to 9223372036854775807"),
        ({"maxOffsetsPerTrigger": "9" * 5_000}, "must be a whole number of 1 or more, up to 9223372036854775807"),
        ({"minOffsetsPerTrigger": "0"}, "must be a whole number of 1 or more"),
        ({"minOffsetsPerTrigger": "8", "maxOffsetsPerTrigger": "7"}, "minOffsetsPerTrigger=8 must not be more than"),
        ({"maxTriggerDelay": "1m"}, "limits the wait of minOffsetsPerTrigger"),
        ({"targetBatchDuration": "2s"}, "makes batches smaller than maxOffsetsPerTrigger: set that one too"),
        ({"maxOffsetsPerTrigger": "8", "targetBatchDuration": "soon"}, "must be a time like 15m, 30s or 500ms"),
        ({"maxOffsetsPerTrigger": "8", "targetBatchDuration": "99"}, "must be 100ms or more"),
        ({"minOffsetsPerTrigger": "8", "maxTriggerDelay": "soon"}, "must be a time like 15m, 30s or 500ms"),
        ({"minOffsetsPerTrigger": "8", "maxTriggerDelay": "5 weeks"}, "must be a time like 15m, 30s or 500ms"),
        ({"assign": '{"orders": [0]}'}, 'a stream does not have: name whole streams by option("subscribe", "a,b")'),
        ({"failOnDataLoss": "fasle"}, "must be true or false; did you mean 'false'?"),
        ({"fieldsAs": "maps"}, "must be array or map or json; did you mean 'map'?"),
        ({"mode": "failfats"}, "did you mean 'failfast'?"),
        ({"startingOffsets": "earliset"}, "'earliset' must be earliest, latest, group or an entry id"),
        ({"startingOffsets": "committed"}, "must be earliest, latest, group or an entry id"),
        ({"startingOffsets": "{nonsense"}, "is not JSON like"),
        ({"startingOffsets": '{"order": "latest"}'}, "not subscribed to; did you mean 'orders'?"),
        ({"startingOffsets": '{"orders": 5}'}, "5 must be earliest"),
        ({"startingOffsets": "5-x"}, "is not an entry id"),
        ({"endingOffsets": "earliest"}, "must be latest or an entry id"),
        ({"startingOffsets": '["orders"]'}, "must be earliest"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970 or a time like"),
        ({"startingOffsetsByTimestamp": "5"}, "must be JSON like"),
        ({"startingOffsetsByTimestamp": '{"orders": {"0": 5}}'}, "milliseconds since 1970 or a time like"),
        ({"startingOffsetsByTimestamp": '{"orders": -5}'}, "milliseconds since 1970 or a time like"),
        ({"startingOffsetsByTimestamp": '{"ordres": 5}'}, "not subscribed to; did you mean 'orders'?"),
        ({"startingOffsetsByTimestampStrategy": "latest"}, "set one of them"),
        ({"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "last"}, "must be error or latest"),
        ({"startingGroup": "workers"}, "option startingGroup needs startingOffsets=group"),
        ({"startingOffsets": "group", "group": ""}, 'name the group by option("startingGroup", NAME)'),
        ({"keyField": "k"}, "option keyField needs layout=packed"),
        ({"layout": "packed", "fieldsAs": "map"}, "option fieldsAs needs layout=columns"),
        ({"committedApp": "a"}, "belong together"),
        ({"readFrom": "replicas"}, "must be primary or replica; did you mean 'replica'?"),
        ({"readAs": "grup"}, "must be log or group; did you mean 'group'?"),
        ({"readAs": "group"}, 'name the consumer group to share by option("group", NAME)'),
        ({"readAs": "group", "group": ""}, "option group is empty"),
        ({"readAs": "group", "group": "g", "consumer": "a b"}, "consumer name 'a b' must be"),
        ({"readAs": "group", "group": "g", "claimAfter": "999ms"}, "must be 1s or more"),
        ({"readAs": "group", "group": "g", "startingOffsets": "group"}, "must be earliest, latest or an entry id"),
        ({"readAs": "group", "group": "g", "startingGroup": "h"}, "option startingGroup needs readAs=log"),
        ({"claimAfter": "5m"}, "option claimAfter needs readAs=group"),
        ({"startingOffsets": "9-1", "endingOffsets": "9-0"}, "after 9-1 and end before that, at 9-0"),
        (
            {"startingTimestamp": "9", "endingOffsets": '{"orders": "5-0"}'},
            "'orders' from 1970-01-01T00:00:00.009Z and",
        ),
        ({"startingTimestamp": "1700000000"}, "for seconds write 1700000000000"),
        (
            {"endingOffsets": "5-0", "maxOffsetsPerTrigger": "5"},
            "cannot be combined: maxOffsetsPerTrigger is for spark.rea",
        ),
        ({"endingOffsets": "5-0", "startingOffsets": "latest"}, "cannot be combined: startingOffsets=latest"),
        ({"pushDownPredicate": "true", "readAs": "group", "group": "g"}, "but pushDownPredicate is for spark.read"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_to_change(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_error_for_a_missing_stream_says_how_to_name_it() -> None:
    with pytest.raises(ConfigError, match="either by option"):
        parse({"url": URL}, {})


def test_starting_offsets_are_words_ids_or_json_per_stream() -> None:
    assert options(startingOffsets="Earliest").starting == OffsetBounds(default="earliest")
    assert options(startingOffsets="5-7").starting == OffsetBounds(default=EntryId(5, 7))
    json = '{"a": "5-7", "b": "latest", "c": ["9-1", 12]}'
    edges = options(subscribe="a,b,c,d", startingOffsets=json).starting
    assert [edges.for_stream(name, "earliest") for name in "abcd"] == [
        EntryId(5, 7),
        "latest",
        EntryId(9, 1),
        "earliest",
    ]
    packed = options(layout="packed", committedApp="a", committedHandler="h", startingOffsets="committed")
    assert packed.starting == OffsetBounds(default="committed")
    assert packed.columns == Columns(packed=True)


@pytest.mark.parametrize(
    "text", ["1357000000000", "2013-01-01T00:26:40Z", "2013-01-01T00:26:40", "2013-01-01T01:26:40+01:00"]
)
def test_a_time_includes_the_entries_of_its_millisecond_at_the_start_and_not_at_the_end(text: str) -> None:
    moment = Timestamp(1357000000000)
    found = options(startingTimestamp=text, startingOffsets="latest", endingTimestamp=text)
    assert (found.starting, found.ending) == (OffsetBounds(default=moment), OffsetBounds(default=moment))
    assert moment.last_id_before == EntryId(1356999999999, 2**64 - 1)


def test_time_zero_is_the_beginning() -> None:
    assert Timestamp(0).last_id_before == ZERO_ID


@pytest.mark.parametrize("side", ["starting", "ending"])
def test_a_time_for_all_streams_overrides_a_time_for_one_and_that_an_offset(side: str) -> None:
    given = {
        f"{side}Offsets": '{"a": "1-0", "b": "2-0"}',
        f"{side}OffsetsByTimestamp": '{"b": 7, "c": "1970-01-01T00:00:00.009Z"}',
    }
    found = options(subscribe="a,b,c,d", **given)
    edges = found.starting if side == "starting" else found.ending
    usual = [edges.for_stream(name, "latest") for name in "abcd"]
    assert usual == [EntryId(1, 0), Timestamp(7), Timestamp(9), "latest"]
    found = options(subscribe="a,b,c,d", **given, **{f"{side}Timestamp": "5"})
    edges = found.starting if side == "starting" else found.ending
    assert {edges.for_stream(name, "latest") for name in "abcd"} == {Timestamp(5)}


def test_a_read_may_end_where_it_begins_and_each_stream_has_ends_of_its_own() -> None:
    options(startingOffsets="9-1", endingOffsets="9-1")
    options(subscribe="a,b", startingOffsets='{"a": "9-0"}', endingOffsets='{"b": "5-0"}')
    options(subscribe="a,b", startingOffsets="9-0", endingOffsets='{"a": "9-1"}')
    with pytest.raises(ConfigError, match="in the stream 'b'"):
        options(subscribe="a,b", startingOffsets="9-0", endingOffsets='{"b": "5-0"}')
    with pytest.raises(ConfigError, match="begin after 9-0"):
        parse({"url": URL, "subscribePattern": "*", "startingOffsets": "9-0", "endingOffsets": "5-0"}, {})


def test_limits_of_a_batch_are_those_of_the_kafka_source() -> None:
    assert options(minOffsetsPerTrigger="8").limits == Limits(min_per_trigger=8, max_delay_ms=900_000)
    for text, ms in {"2m": 120_000, "30 s": 30_000, "500ms": 500, "7": 7, "1H": 3_600_000, "0s": 0}.items():
        assert options(minOffsetsPerTrigger="8", maxTriggerDelay=text).limits.max_delay_ms == ms


def test_the_group_to_begin_at_is_the_query_s_own_unless_another_is_named() -> None:
    with pytest.raises(ConfigError, match="or that of the query"):
        options(startingOffsets="group")
    assert options(startingOffsets="group", group="mine").starting_group == "mine"
    found = options(startingOffsets='{"orders": "GROUP"}', startingGroup="workers", group="")
    assert (found.starting_group, found.starting.for_stream("orders", "latest")) == ("workers", "group")


def test_a_query_that_shares_a_group_reads_bounded_batches_and_waits_before_it_claims() -> None:
    found = options(readAs="Group", group="g")
    assert (found.sharing, found.limits.max_per_trigger) == (
        Sharing(group="g", consumer="spark", claim_idle_ms=300_000),
        10_000,
    )
    found = options(readAs="group", group="g", consumer="mine", claimAfter="90s", maxOffsetsPerTrigger="7")
    assert (found.sharing, found.limits.max_per_trigger) == (
        Sharing(group="g", consumer="mine", claim_idle_ms=90_000),
        7,
    )
    with pytest.raises(ConfigError, match=r"is for spark\.readStream"):
        found.check_batch()


def test_options_of_the_other_kind_of_query_are_refused() -> None:
    for given in ({"endingTimestamp": "5"}, {"endingOffsetsByTimestamp": '{"orders": 5}'}, {"endingOffsets": "5"}):
        with pytest.raises(ConfigError, match="does not end"):
            options(**given).check_streaming()
    with pytest.raises(ConfigError, match=r"is for spark\.read"):
        options(pushDownPredicate="true").check_streaming()
    for given in ({"startingOffsets": "latest"}, {"startingOffsets": '{"orders": "latest"}'}):
        with pytest.raises(ConfigError, match="leaves nothing to read"):
            options(**given).check_batch()
    some = '{"orders": "1-0", "refunds": "latest"}'
    options(subscribe="orders,refunds", startingOffsets=some).check_batch()
    parse({"url": URL, "subscribePattern": "*", "startingOffsets": some}, {}).check_batch()
    with pytest.raises(ConfigError, match="leaves nothing to read"):
        parse({"url": URL, "subscribePattern": "*", "startingOffsets": "latest"}, {}).check_batch()
    for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
        with pytest.raises(ConfigError, match=r"for spark\.readStream"):
            options(**{name: "5"}).check_batch()
