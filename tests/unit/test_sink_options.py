"""The options of the Spark sink: what they mean, and what is said about wrong ones."""

import pytest

from millstream.errors import ConfigError
from millstream.redis_client import DEFAULT_URL
from millstream.spark.sink import WriteOptions
from millstream.spark.sink.options import Layout, SinkOptions, parse_sink

pytestmark = [pytest.mark.sink]

URL = "redis://127.0.0.1:6379/0"


def options(**given: str) -> SinkOptions:
    return parse_sink({"url": URL, **given}, {})


def test_names_of_options_are_read_in_any_case_and_spark_adds_its_own() -> None:
    given = {"URL": URL, "STREAM": "a", "maxLen": "7", "EXACTTRIM": "True", "checkpointlocation": "x", "queryname": "q"}
    found = parse_sink(given, {})
    assert found == SinkOptions(url=URL, layout=Layout(stream="a"), write_options=WriteOptions(maxlen=7, exact=True))


def test_the_defaults_are_those_of_the_documentation() -> None:
    assert options() == SinkOptions(url=URL, layout=Layout(stream_column="stream"))
    assert options(fieldsAs="fields").layout.fields_column == "fields"
    assert options(fieldsAs="json").layout.json_field == "json"
    assert parse_sink({"stream": "a"}, {"MILLSTREAM_URL": URL}).url == URL


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"strem": "x"}, "did you mean 'stream'?"),
        ({"maxlne": "1"}, "did you mean 'maxlen'?"),
        ({"colour": "red"}, "the options for writing are url, "),
        ({"subscribe": "a"}, "'subscribe' is unknown"),
        ({"path": "x"}, "save() and start() take no path here"),
        ({"stream": ""}, "option stream is empty"),
        ({"stream": "a}b"}, "cannot be used"),
        ({"stream": "a", "streamColumn": "b"}, "not by both"),
        ({"maxlen": "-1"}, "must be a whole number of 0 or more"),
        ({"maxlen": "1", "minid": "1-1"}, "not by both"),
        ({"minid": "x"}, "is not an entry id"),
        ({"exactTrim": "true"}, "needs maxlen or minid"),
        ({"maxlen": "1", "exactTrim": "ture"}, "did you mean 'true'?"),
        ({"existingIds": "skip"}, "needs idColumn"),
        ({"idColumn": "i", "existingIds": "skipp"}, "did you mean 'skip'?"),
        ({"fieldsAs": "colums"}, "did you mean 'columns'?"),
        ({"fieldsColumn": "f"}, "needs fieldsAs=fields"),
        ({"jsonField": "f"}, "needs fieldsAs=json"),
        ({"txnAppId": "a"}, "belong together"),
        ({"target": "hahs"}, "did you mean 'hash'?"),
        ({"target": "hash", "keyColumn": "k"}, "the column that is greater in newer rows"),
        ({"target": "hash", "keyColumn": "k", "guardColumn": "g", "guardField": '"'}, "must be letters"),
        ({"target": "json", "stream": "a"}, "option stream needs target=stream"),
        ({"keyColumn": "k"}, "option keyColumn needs target=hash or target=json"),
        ({"txnAppId": "a b", "txnVersion": "1"}, "must be 1 to 100 letters"),
        ({"txnAppId": "a", "txnVersion": "one"}, "must be a whole number of 0 or more"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_to_change(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_an_option_and_a_variable_the_url_is_the_default_one() -> None:
    assert parse_sink({"stream": "a"}, {}).url == DEFAULT_URL


def test_a_transaction_number_is_for_batches_only() -> None:
    numbered = options(stream="a", txnAppId="nightly", txnVersion="7")
    assert numbered.transaction == ("nightly", 7)
    with pytest.raises(ConfigError, match="a streaming query numbers its own batches"):
        numbered.check_streaming()
