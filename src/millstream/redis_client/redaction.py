"""Redaction of passwords and tokens in URLs, and in any text that is shown or logged.

An error about a mistyped URL quotes it. So only the known harmless parts of a URL are shown, rather than everything
except the place where the password ought to be.
"""

import logging
import re
import traceback
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

HIDDEN = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,2}")
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.DOTALL)
_USER = re.compile(r"([\w.%-]*):.+", re.DOTALL)
_HOST = re.compile(r"([\w.-]*|\[[0-9A-Fa-f:.]*\])(?::(.*))?", re.DOTALL)
_PATH = re.compile(r"[\w./%+~,-]*")
_HARMLESS = frozenset(
    (
        *("client_name", "db", "protocol", "socket_connect_timeout", "socket_timeout", "ssl_ca_certs", "ssl_ca_path"),
        *("ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile"),
    )
)
"""Options of a URL whose values may be shown."""

_PASSWORD_OPTIONS = ("password", "ssl_password")
_MIN_SECRET_CHARS = 8
"""A shorter password, or one of letters only, is redacted in URLs only, not in other texts: it may be an ordinary word
there, and a gap in a well-known sentence would reveal it."""

# Bounded, as texts may be long and of any content.
_URL_IN_TEXT = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}[^\s'"<>]{0,2000}@""")
_OPTION_IN_TEXT = re.compile(r"""(?i)([?&;][\w.-]{0,30}(?:password|passwd|secret|token)[\w.-]{0,30}=)[^&;\s'"]+""")
_GATEWAY_TOKEN = re.compile(r"(Command to send: A(?:\\n|\n))[^\s\\]+")
"""py4j's log line of its login to Java, with the token."""

_secrets: set[str] = set()


def redact_url(url: str) -> str:
    """`url` without any part that may be its password, however malformed; for logs and error texts."""
    scheme = found[0] if (found := _SCHEME.match(url)) else ""
    # A password that is not percent-encoded may contain any delimiter of a URL: it ends at the last @.
    credentials, at, rest = url[len(scheme) :].rpartition("@")
    hosts, path, query, fragment = (part or "" for part in _parts(rest))
    return "".join(
        (
            scheme,
            _credentials(credentials) if at else "",
            at,
            ",".join(map(_host, hosts.split(","))),
            path if _PATH.fullmatch(path) else f"/{HIDDEN}",
            f"?{'&'.join(map(_option, query.split('&')))}" if query else "",
            f"#{HIDDEN}" if fragment else "",
        )
    )


def register_secrets(url: str) -> None:
    """Register the credentials in `url`: `redact_text` removes them from every text from now on."""
    scheme = found[0] if (found := _SCHEME.match(url)) else ""
    credentials, _, rest = url[len(scheme) :].rpartition("@")
    user, colon, password = credentials.partition(":")
    options = parse_qsl(_parts(rest)[2] or "")
    secrets = (password if colon else user, *(value for name, value in options if name in _PASSWORD_OPTIONS))
    for secret in secrets:
        _secrets.update(one for one in (secret, unquote(secret)) if len(one) >= _MIN_SECRET_CHARS and not one.isalpha())


def redact_text(text: str) -> str:
    """`text` without credentials in URLs, registered passwords and py4j's token."""
    text = _URL_IN_TEXT.sub(lambda url: redact_url(url[0]), text)
    text = _OPTION_IN_TEXT.sub(rf"\1{HIDDEN}", text)
    text = _GATEWAY_TOKEN.sub(rf"\1{HIDDEN}", text)
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_own_records() -> None:
    """From now on, remove credentials from every record that millstream logs in this process, whatever formats it.

    May be repeated, as an app may replace the factory of records.
    """
    make = logging.getLogRecordFactory()
    if not isinstance(make, _RedactingFactory):
        logging.setLogRecordFactory(_RedactingFactory(make))


class _RedactingFactory:
    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **options: Any) -> logging.LogRecord:
        record = self._make(*args, **options)
        if record.name.partition(".")[0] == "millstream":
            _redact_record(record)
        return record


def _redact_record(record: logging.LogRecord) -> None:
    message = record.getMessage()
    if (redacted := redact_text(message)) != message:
        record.msg, record.args = redacted, ()
    if record.exc_info:
        text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (redacted := redact_text(text)) != text:
            record.exc_info, record.exc_text = None, redacted


def _parts(rest: str) -> tuple[str | None, ...]:
    found = _PARTS.fullmatch(rest)
    assert found is not None  # the pattern matches every text
    return found.groups()


def _credentials(text: str) -> str:
    """The user name, if a colon follows it: without a colon, the text may be a password."""
    found = _USER.fullmatch(text)
    return f"{found[1]}:{HIDDEN}" if found else HIDDEN


def _host(text: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None:
        return HIDDEN
    port = found[2]
    return found[1] if port is None else f"{found[1]}:{port if port.isdecimal() else HIDDEN}"


def _option(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        return HIDDEN
    return f"{name}={value if name in _HARMLESS and _PATH.fullmatch(value) else HIDDEN}"
