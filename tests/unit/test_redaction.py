"""No password leaves the process: not in a URL however it is written, a text, a log record, nor the repr of an object."""

import ast
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream
from millstream.cli.terminal import OneLineFormatter
from millstream.errors import ConfigError, MillstreamError
from millstream.handlers.dead_letter import DeadLetter
from millstream.redis_client.client import Client
from millstream.redis_client.redaction import HIDDEN, redact_text, redact_url, register_secrets
from tests.support.syntax import nodes_of
from tests.support.urls import FORMS, PASSWORD, contains_password

pytestmark = [pytest.mark.cli]

SOURCE = Path(millstream.__file__).parent


@pytest.mark.parametrize("url", FORMS)
def test_a_redacted_url_has_no_password(url: str) -> None:
    assert not contains_password(redact_url(url))
    assert redact_url(redact_url(url)) == redact_url(url)


@given(before=st.text(max_size=4), after=st.text(max_size=4), user=st.sampled_from(["", "me"]))
def test_a_password_of_any_characters_is_redacted(before: str, after: str, user: str) -> None:
    url = f"redis://{user}:{before}{PASSWORD}{after}@h:1/0"
    assert redact_url(url) == f"redis://{user}:{HIDDEN}@h:1/0"
    register_secrets(url)
    assert not contains_password(redact_text(f"Error: cannot say {before}{PASSWORD}{after} to h"))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "redis://host",
            "redis://host:1/0",
            "rediss://[::1]:6379/3",
            "unix:///run/redis/redis.sock?db=2",
            "http://host",
        ),
        *("redis+sentinel://a:1,b:2/mymaster/3", "redis+cluster://a,b:7", "host:6379", "nonsense", ""),
        "rediss://h/0?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required",
    ],
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert redact_url(url) == url


def test_the_user_and_the_hosts_are_shown() -> None:
    assert redact_url("redis+sentinel://me:pw@a:1,b:2/name/0") == f"redis+sentinel://me:{HIDDEN}@a:1,b:2/name/0"


@pytest.mark.parametrize("url", FORMS)
def test_no_error_and_no_repr_of_a_client_shows_the_password(url: str) -> None:
    client = Client(url, timeout_ms=1_000)
    assert not contains_password(repr(client))
    with pytest.raises(MillstreamError) as caught:
        client.execute("PING")
    assert not contains_password(str(caught.value))
    if isinstance(caught.value, ConfigError):
        assert caught.value.__cause__ is None  # what Python says of such a URL quotes the password


def test_passwords_in_urls_options_and_registered_secrets_are_redacted_in_other_texts() -> None:
    register_secrets(f"redis://:{PASSWORD}%2Fx@h")
    for text in (
        f"cannot open redis://other:{PASSWORD[::-1]}@h:1/0?db=1, nor http://a:{PASSWORD[::-1]}@h",
        f"GET http://h/x?token={PASSWORD[::-1]}&n=1",
        f"the password {PASSWORD}/x is wrong",
    ):
        assert not contains_password(redact_text(text))
        assert PASSWORD[::-1] not in redact_text(text)
    assert redact_text("redis://h:1/0 and me@example.org") == "redis://h:1/0 and me@example.org"


def test_a_log_record_of_any_library_has_neither_password_nor_token() -> None:
    sent = f"c\no69\noption\nsurl\nsredis://:{PASSWORD}@h:1/0\ne\n"
    try:
        raise ValueError(f"no such host in redis://me:{PASSWORD}@h")
    except ValueError as error:
        trouble = (type(error), error, error.__traceback__)
    for record in (
        logging.LogRecord("py4j.clientserver", logging.DEBUG, "f", 1, f"Command to send: {sent}", (), None),
        logging.LogRecord(
            "py4j.clientserver", logging.DEBUG, "f", 1, f"Command to send: A\n{PASSWORD[::-1]}\n", (), None
        ),
        logging.LogRecord("x", logging.WARNING, "f", 1, "at %s", (f"redis://{PASSWORD}@h",), None),
        logging.LogRecord("x", logging.ERROR, "f", 1, "it broke", (), trouble),
    ):
        line = OneLineFormatter("%(levelname)s %(message)s").format(record)
        assert not contains_password(line)
        assert PASSWORD[::-1] not in line


def test_a_dead_letter_keeps_no_password_of_a_url_that_an_error_quotes() -> None:
    letter = DeadLetter(
        stream="s",
        id="1-1",
        pairs=[b"url", b"redis://:pw@h"],
        key=None,
        app="a",
        handler="h",
        attempts=1,
        reason="failed",
        error=f"no redis://:{PASSWORD}@h",
        traceback=f"open('redis://me:{PASSWORD}@h')",
        time_ms=1,
    )
    kept = [item.decode() if isinstance(item, bytes) else str(item) for item in letter.items()[:-1]]
    assert not contains_password(" ".join(kept))
    assert (
        DeadLetter.parse(b"1-1", [str(i).encode() if not isinstance(i, bytes) else i for i in letter.items()]).pairs
        == letter.pairs
    )


@pytest.mark.parametrize("part", ["a", "a:/", "?password", "&token=", "a://@"])
def test_a_long_text_is_redacted_in_linear_time(part: str) -> None:
    """Were its length squared the time that it takes, no test would outlast that."""
    redact_text(part * (200_000 // len(part)))


def secrets_of(kind: ast.ClassDef, path: Path) -> list[ast.AnnAssign]:
    """The fields of a dataclass that hold what must not be shown. A token that is no credential is one of a lease."""
    names = {"url", "password", "ticket", *(("token",) if "services" in path.parts else ())}
    return [
        line
        for line in kind.body
        if isinstance(line, ast.AnnAssign)
        and ast.unparse(line.target) in names
        and "str" in ast.unparse(line.annotation)
        and any("dataclass" in ast.unparse(one) for one in kind.decorator_list)
    ]


@pytest.mark.xdist_group("syntax")  # what is parsed is parsed once
def test_the_repr_of_settings_shows_no_secret() -> None:
    """They stand in what is printed to find a mistake."""
    found = [
        (f"{path}:{line.lineno}", ast.unparse(line.value) if line.value else "")
        for path in SOURCE.rglob("*.py")
        if "testing" not in path.parts
        for kind in nodes_of(path.read_text())
        if isinstance(kind, ast.ClassDef)
        for line in secrets_of(kind, path)
    ]
    assert len(found) >= 10
    assert [place for place, value in found if "repr=False" not in value] == []
