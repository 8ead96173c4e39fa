"""What Spark receives when the source refuses: one error, and no more of a traceback than its last step."""

import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ConfigError, DataLoss
from millstream.model import EntryId
from millstream.spark.error_boundary import clean_traceback, clean_tracebacks
from millstream.spark.source.data_loss import Loss, LossPolicy
from millstream.spark.source.offsets import Position
from millstream.spark.source.provider import RedisStreamsSource

pytestmark = [pytest.mark.spark]

URL = "redis://127.0.0.1:6379/0"


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"url": "http://x"}, "the URL must begin with redis://"),
        ({"url": "redis://h:1/0x"}, "'0x' is not a database"),
        ({"maxOffsetsPerTrigger": "0"}, "must be a whole number"),
        ({"starttt": "x"}, "option 'starttt' is unknown"),
        ({"startingOffsets": "9-0", "endingOffsets": "8-0"}, "and end before that"),
    ],
)
def test_a_wrong_option_is_refused_with_a_short_traceback_when_the_source_is_made(
    given: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStreamsSource({"url": URL, "subscribe": "s", **given})
    # The test's own frame, then the boundary, called and left.
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["guarded"]
    assert complaint in shown(caught.value).splitlines()[-1]
    assert "noqa" not in shown(caught.value)


def test_read_options_are_checked_without_a_subscription_too() -> None:
    with pytest.raises(ConfigError, match="to read, name the streams either by"):
        RedisStreamsSource({"url": URL, "startingOffsets": "earliest"})
    RedisStreamsSource({"url": URL, "fieldsAs": "json"})
    RedisStreamsSource({"url": URL, "stream": "s"})


def test_a_mode_without_typed_columns_is_refused_when_spark_asks_for_the_schema() -> None:
    source = RedisStreamsSource({"url": URL, "subscribe": "s", "mode": "failfast"})
    with pytest.raises(ConfigError, match="mode=failfast is for typed columns"):
        source.schema()


def test_errors_of_millstream_lose_their_traceback_and_cause_and_other_errors_keep_them() -> None:
    def fails(error: Exception) -> Any:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise error from cause

    with pytest.raises(DataLoss) as caught:
        clean_tracebacks(fails)(DataLoss("gone"))
    assert "inner" not in shown(caught.value)
    assert "in fails" not in shown(caught.value)
    with pytest.raises(DataLoss) as caught:
        list(clean_traceback(fails(DataLoss("gone")) for _ in range(3)))
    assert "in fails" not in shown(caught.value)
    with pytest.raises(ValueError, match="a bug") as bug:
        clean_tracebacks(fails)(ValueError("a bug"))
    assert "inner" in shown(bug.value)
    assert "in fails" in shown(bug.value)


def test_a_loss_is_reported_with_the_count_of_entries_where_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    losses, at = LossPolicy(fail=False), Position(EntryId(5, 0), 5)
    losses.report(Loss(stream="live", start=at, count=None))
    assert "deleted or recreated" in caplog.text
    assert "The number of lost entries is unknown" in caplog.text
    assert "(0 " not in caplog.text
    caplog.clear()
    losses.report(Loss(stream="orders", start=at, count=7))
    assert "(7 entries so far, " in caplog.text


RUNNER = """
import sys
from millstream.spark.error_boundary import end_process_if_disconnected

try:
    {statement}
finally:
    end_process_if_disconnected()
    print("went on")
"""


@pytest.mark.parametrize(
    ("program", "statement", "ends"),
    [
        ("python_streaming_source_runner.py", "raise EOFError", True),
        ("python_streaming_source_runner.py", "raise BrokenPipeError", True),
        ("python_streaming_source_runner.py", "raise ValueError", False),
        ("python_streaming_source_runner.py", "pass", False),
        ("notebook.py", "raise EOFError", False),
    ],
)
def test_a_source_whose_query_has_closed_the_connection_ends_without_a_traceback(
    tmp_path: Path, program: str, statement: str, ends: bool
) -> None:
    (tmp_path / program).write_text(RUNNER.format(statement=statement))
    found = subprocess.run([sys.executable, str(tmp_path / program)], capture_output=True, text=True, check=False)
    assert ("went on" not in found.stdout) == ends
    assert (found.stderr == "") == (ends or statement == "pass")
    assert (found.returncode == 0) == (ends or statement == "pass")
