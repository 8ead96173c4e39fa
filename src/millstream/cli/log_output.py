"""Logging of the commands: its level and format, without replacing the app's own configuration.

Until the app is loaded, records go to a handler of last resort, so that `logging.basicConfig` of the app takes effect.
After that the root logger gets millstream's handler only if the app has given it none.
"""

import json
import logging
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from millstream.cli.terminal import OneLineFormatter, format_messages_with
from millstream.redis_client.redaction import redact_own_records, redact_text

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_FAILURE_FIELDS = ("handler", "stream", "id", "key", "attempt", "exception", "traceback")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Settings of the log of one process.

    * `level`, `format`: as the user chose them; None leaves them to the app, and else to the defaults: warning, text
    * `debug`: millstream's own records from DEBUG on
    * `worker`: the name of this worker process, added to each record; "" for none
    """

    level: Level | None = None
    format: Format | None = None
    debug: bool = False
    worker: str = ""


class TextFormatter(OneLineFormatter):
    """A line: the time in UTC, the level, the worker's name if it has one, and the message; then the traceback."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {worker.replace('%', '%%')}{': ' if worker else ''}%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's
        """See logging.Formatter."""
        return _utc(record.created)


class JsonFormatter(logging.Formatter):
    """A line of JSON: time, level, logger and message; worker, exception, traceback and a failure's fields if known."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields: dict[str, Any] = {name: getattr(record, name, None) for name in _FAILURE_FIELDS}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception"] = "".join(traceback.format_exception_only(record.exc_info[1])).strip()
            fields["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["traceback"] = record.exc_text
        return _json_line(
            record.created, record.levelname, record.name, record.getMessage(), worker=self._worker, **fields
        )


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment: a live line in a terminal replaces `sys.stderr`."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


_handler: logging.Handler = _StderrHandler()
_settings = [LogSettings()]


def settings() -> LogSettings:
    """The settings of this process."""
    return _settings[0]


def start_logging(chosen: LogSettings) -> None:
    """Log to stderr from now on, until the app configures logging. Records of millstream have no password in any case.

    Some libraries log everything they send. py4j, for example, logs Redis' URL and the token by which it logs in to
    Java: it stays at WARNING.
    """
    _settings[0] = chosen
    redact_own_records()
    worker = chosen.worker
    _handler.setFormatter(JsonFormatter(worker) if chosen.format == "json" else TextFormatter(worker))
    logging.lastResort = _handler
    logging.getLogger().setLevel((chosen.level or "warning").upper())
    logging.getLogger("py4j").setLevel(logging.WARNING)
    if chosen.debug:
        logging.getLogger("millstream").setLevel(logging.DEBUG)
    format_messages_with(_message_as_json if chosen.format == "json" else None)


def finish_logging() -> None:
    """Complete the configuration, once the app is loaded: the app's own holds, except for the user's options.

    `dictConfig` disables all loggers that exist and that it does not name: those of millstream are enabled again.
    """
    redact_own_records()
    for name, one in logging.root.manager.loggerDict.items():
        if isinstance(one, logging.Logger) and name.partition(".")[0] == "millstream":
            one.disabled = False
    root = logging.getLogger()
    if settings().format is not None:
        for handler in root.handlers[:]:
            if type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.stdout):
                root.removeHandler(handler)
    if settings().format is not None or not root.handlers:
        root.addHandler(_handler)
    if (level := settings().level) is not None:
        root.setLevel(level.upper())


def _message_as_json(text: str) -> str:
    level = "ERROR" if text.startswith("error: ") else "INFO"
    return _json_line(time.time(), level, "millstream", text, worker=settings().worker)


def _json_line(created_s: float, level: str, logger: str, message: str, **fields: Any) -> str:
    fields_in_order = {"time": _utc(created_s), "level": level.lower(), "logger": logger, "message": message, **fields}
    shown = {name: redact_text(one) if isinstance(one, str) else one for name, one in fields_in_order.items()}
    return json.dumps({name: one for name, one in shown.items() if one not in (None, "")}, default=str)


def _utc(created_s: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(created_s))}.{int(created_s * 1000) % 1000:03d}Z"
