"""What must not leave the process, passwords above all: taken out of URLs, and out of any text that is shown.

A URL that somebody has mistyped is refused, and the refusal quotes it. So what is shown of a URL is what is known to
be harmless, not what is left when the password is cut out of where it ought to be.
"""

import re
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
_SHORTEST = 8
"""A shorter password, or one of letters only, is taken out of URLs, but not out of other texts: it may be a word in
them, and to leave that word out of a well-known sentence would tell it."""

# With bounds, as nobody knows how long the texts are, and what in them.
_URL_IN_TEXT = re.compile(r"""[A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2}[^\s'"<>]{0,2000}@""")
_OPTION_IN_TEXT = re.compile(r"""(?i)([?&;][\w.-]{0,30}(?:password|passwd|secret|token)[\w.-]{0,30}=)[^&;\s'"]+""")
_GATEWAY_TOKEN = re.compile(r"(Command to send: A(?:\\n|\n))[^\s\\]+")
"""How py4j logs that it logs in to Java."""

_secrets: set[str] = set()


def redact(url: str) -> str:
    """Return `url` without anything that may be its password, fit for logs and messages, however it is written."""
    scheme = found[0] if (found := _SCHEME.match(url)) else ""
    # A password that is not encoded may hold any of the characters that a URL is made of: the last @ is the end of it.
    credentials, at, place = url[len(scheme) :].rpartition("@")
    hosts, path, query, fragment = (part or "" for part in _parts(place))
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


def keep_secret(url: str) -> None:
    """From now on, the credentials in `url` are taken out of every text that goes through `redacted`."""
    scheme = found[0] if (found := _SCHEME.match(url)) else ""
    credentials, _, place = url[len(scheme) :].rpartition("@")
    user, colon, password = credentials.partition(":")
    options = parse_qsl(_parts(place)[2] or "")
    found_here = (password if colon else user, *(value for name, value in options if name in _PASSWORD_OPTIONS))
    for secret in found_here:
        _secrets.update(one for one in (secret, unquote(secret)) if len(one) >= _SHORTEST and not one.isalpha())


def redacted(text: str) -> str:
    """`text` without credentials in URLs, without passwords that were to be kept secret, and without py4j's token."""
    text = _URL_IN_TEXT.sub(lambda url: redact(url[0]), text)
    text = _OPTION_IN_TEXT.sub(rf"\1{HIDDEN}", text)
    text = _GATEWAY_TOKEN.sub(rf"\1{HIDDEN}", text)
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _parts(place: str) -> tuple[str | None, ...]:
    found = _PARTS.fullmatch(place)
    assert found is not None  # it fits every text
    return found.groups()


def _credentials(text: str) -> str:
    """The user, if it is one: who forgets the colon has written the password there."""
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
