"""What the commands log to stderr: the app's own configuration holds, and no record has a password in any case."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.log_output import JsonFormatter, LogSettings, TextFormatter
from millstream.redis_client.redaction import redact_own_records
from tests.support.urls import PASSWORD, contains_password
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.cli]

PROGRAM = f"""
import logging, sys
from millstream.cli.log_output import LogSettings, finish_logging, start_logging
from millstream.cli.terminal import print_message
start_logging(LogSettings(**SETTINGS))
logging.getLogger("millstream.x").warning("before")
APP
finish_logging()
logging.getLogger("millstream.x").warning("of millstream: redis://:{PASSWORD}@h")
logging.getLogger("app").info("of the app")
logging.info("of the root")
print_message("a message")
"""
BASIC = "logging.basicConfig(format='OWN %(levelname)s %(message)s', level=logging.INFO)"
DICT = """
import logging.config
logging.config.dictConfig({"version": 1, "formatters": {"f": {"format": "OWN %(message)s"}}, "handlers":
    {"h": {"class": "logging.StreamHandler", "formatter": "f"}}, "root": {"level": "INFO", "handlers": ["h"]}})
"""
OF_MILLSTREAM = "of millstream: redis://:***@h"


def logged(app: str = "", **settings: object) -> list[str]:
    """The lines on stderr of a command that loads `app`."""
    given = {**asdict(LogSettings()), **settings}
    program = PROGRAM.replace("SETTINGS", repr(given)).replace("APP", app)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=FAIL_SAFE_S, check=True, env=os.environ
    )
    assert not contains_password(done.stderr)
    return done.stderr.splitlines()


def without_time(lines: list[str]) -> list[str]:
    return [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line) for line in lines]


def test_an_app_that_configures_nothing_gets_lines_with_time_and_level_from_warning_on() -> None:
    lines = logged()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z WARNING before$", lines[0])
    assert without_time(lines) == ["WARNING before", f"WARNING {OF_MILLSTREAM}", "a message"]


def test_the_log_of_the_app_can_be_seen_and_lines_name_the_worker() -> None:
    assert without_time(logged(level="info", worker="w-0")) == [
        "WARNING w-0: before",
        f"WARNING w-0: {OF_MILLSTREAM}",
        "INFO w-0: of the app",
        "INFO w-0: of the root",
        "a message",
    ]


@pytest.mark.parametrize(("app", "level"), [(BASIC, ("WARNING ", "INFO ")), (DICT, ("", ""))])
def test_the_logging_of_an_app_is_kept_and_hides_no_record_of_millstream(app: str, level: tuple[str, str]) -> None:
    warning, info = level
    assert without_time(logged(app)) == [
        "WARNING before",
        f"OWN {warning}{OF_MILLSTREAM}",
        f"OWN {info}of the app",
        f"OWN {info}of the root",
        "a message",
    ]


def test_records_that_millstream_logs_while_the_app_is_loaded_have_no_password() -> None:
    app = f"{BASIC}; logging.getLogger('millstream.x').warning('at redis://:{PASSWORD}@h')"
    assert "OWN WARNING at redis://:***@h" in logged(app)


def test_the_log_options_of_the_command_override_the_logging_of_the_app() -> None:
    lines = [json.loads(line) for line in logged(BASIC, level="warning", format="json")]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("warning", "millstream.x", "before"),
        ("warning", "millstream.x", OF_MILLSTREAM),
        ("info", "millstream", "a message"),
    ]


def test_a_file_that_the_app_logs_to_is_kept_in_any_case(tmp_path: Path) -> None:
    app = f"logging.getLogger().addHandler(logging.FileHandler('{tmp_path}/log'))"
    assert len(logged(app, format="json")) == 3
    assert OF_MILLSTREAM in (tmp_path / "log").read_text()


@pytest.fixture
def redacting() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    redact_own_records()
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("redacting")
def test_a_record_of_millstream_has_no_password_with_any_formatter(caplog: pytest.LogCaptureFixture) -> None:
    inner = logging.getLogRecordFactory()

    def of_the_app(*args: Any, **options: Any) -> logging.LogRecord:
        record: logging.LogRecord = inner(*args, **options)
        record.host = "h"
        return record

    logging.setLogRecordFactory(of_the_app)
    redact_own_records()
    try:
        raise ValueError(f"redis://:{PASSWORD}@h")
    except ValueError:
        logging.getLogger("millstream.y").exception("no %s", f"redis://:{PASSWORD}@h")
    logging.getLogger("millstream.y").warning("%d%% of %s", 3, "it")
    first, second = [one for one in caplog.records if one.name == "millstream.y"]
    assert not contains_password(logging.Formatter("%(message)s").format(first))
    assert "ValueError: redis://:***@h" in logging.Formatter().format(first)
    assert (second.msg, second.args, second.getMessage()) == ("%d%% of %s", (3, "it"), "3% of it")


def test_a_json_line_has_exception_and_traceback_and_only_fields_that_are_known() -> None:
    try:
        raise ValueError("odd \ud800\n")
    except ValueError:
        record = logging.LogRecord("app", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info())
    line = json.loads(JsonFormatter("w-1").format(record))
    assert line.pop("time").endswith("Z")
    assert line.pop("traceback").startswith("Traceback")
    assert line == {
        "level": "error",
        "logger": "app",
        "message": "it broke",
        "worker": "w-1",
        "exception": "ValueError: odd \ud800",
    }
    assert TextFormatter("").format(record).partition("\n")[0].endswith("Z ERROR it broke")
