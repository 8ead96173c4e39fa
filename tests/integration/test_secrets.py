"""Every command, with every form of a URL that has a password: nothing that is printed has it."""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from millstream.cli.main import COMMANDS
from millstream.redis_client.embedded_server import EmbeddedServer
from tests.support.commandline import call, ended, running
from tests.support.urls import FORMS, NOWHERE, PASSWORD, contains_password
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

SOAK = bool(os.environ.get("MILLSTREAM_SOAK"))

APP = """
from millstream import App, Message
app = App("shop")
@app.handler("orders", key="k")
def handle(message: Message): ...
def consume(message): ...
"""

BRIEF: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "publish": (("s", "--format", "csv", "--wait", "0"),),
    "delayed": (("list", "s"), ("cancel", "s", "1-0", "--yes")),
    "tail": (("s",), ("s*", "--no-follow")),
    "audit": ((),),
    "history": ((),),
    "info": ((), ("--json",)),
    "top": ((), ("--json",)),
    "why": (("a.h", "k"),),
    "find": (("k",),),
    "mcp": ((),),
    "bench": (("--yes",),),
    "check": (("APP:app", "--yes"),),
    "replay": (("APP:app", "h", "k", "--yes"),),
    "state": (
        ("show", "a.h", "k"),
        ("list", "a.h", "--stream", "s"),
        ("export", "a.h"),
        ("reset", "a.h", "--stream", "s", "k", "--yes"),
    ),
    "group": (
        ("list", "s"),
        ("consumers", "s", "g"),
        ("create", "s", "g"),
        ("set-id", "s", "g", "--after", "latest", "--yes"),
        ("clean", "s"),
        ("pending", "s", "g"),
        ("claim", "s", "g", "c", "1-0"),
    ),
    "forget": (("a.h", "--yes"),),
    "drain": (("w", "--yes"),),
    "pause": (("a.h",),),
    "resume": (("a.h",),),
    "rate": (("set", "a.h", "60/m"), ("clear", "a.h"), ("show",)),
    "key": (
        ("list",),
        ("list", "a.h"),
        ("show", "a.h", "k"),
        ("park", "a.h", "k"),
        ("unpark", "a.h", "k"),
        ("skip", "a.h", "k", "--yes"),
    ),
    "lease": (("list", "s"), ("add", "s", "t"), ("release", "s", "t", "--yes"), ("remove", "s", "t", "--yes")),
    "partition": (("show", "b"), ("grow", "b", "3", "--yes")),
    "dlq": (
        ("list",),
        ("show", "1-0"),
        ("edit", "a.h", "1-0", "--set", "n=1", "--yes"),
        ("redrive", "--all", "--yes"),
        ("purge", "--all", "--yes"),
    ),
}
"""Commands that do one thing and end."""

SERVICES = {
    "worker": ("APP:app",),
    "auto": ("APP:app",),
    "master": ("--ticket-stream", "s", "--concurrency-stream-group", "g", "--insecure-no-token", "--port", "0"),
    "consumer": (
        *("APP:consume", "--ticket-stream", "s", "--concurrency-stream-group", "g", "--name", "c"),
        *("--master-register-api-url", "http://127.0.0.1:1/api/consumers/register"),
        *("--master-acknowledge-api-url", "http://127.0.0.1:1/api/messages/acknowledge"),
    ),
    "serve": ("--insecure-no-token", "--port", "0"),
    "exporter": ("--metrics-address", "0"),
    "console": ("--port", "0"),
    "relay": ("postgres", "s", "--database", "host=127.0.0.1 port=1"),
}
"""Commands that go on until they are stopped, and wait for Redis meanwhile."""

ELSEWHERE = {"doctor": "below", "run": "tests/spark/test_run_command.py", "demo": "starts what `run` starts"}
WITHOUT_URL = {"dev", "init", "acl", "class-archive"}


@pytest.fixture
def quiet_again() -> Iterator[None]:
    """What --debug switches on in this process is for this test alone."""
    yield
    logging.getLogger("millstream").setLevel(logging.NOTSET)


@pytest.fixture
def app(tmp_path: Path) -> str:
    path = tmp_path / f"{tmp_path.name}.py"  # a module name of its own, as some commands import it into this process
    path.write_text(APP)
    return str(path)


def test_every_command_is_tested() -> None:
    assert {*BRIEF, *SERVICES, *ELSEWHERE, *WITHOUT_URL} == set(COMMANDS)


@pytest.mark.parametrize("name", BRIEF)
@pytest.mark.usefixtures("quiet_again")
def test_no_command_shows_the_password_of_any_url_nor_does_its_traceback(name: str, app: str) -> None:
    # A third of the forms for each command, so each form for a third of them; with full counts all for each subcommand.
    forms = FORMS[[*BRIEF].index(name) % 3 :: 3]
    for number, arguments in enumerate(BRIEF[name]):
        for url in FORMS if SOAK else forms[number :: len(BRIEF[name])]:
            given = [one.replace("APP", app) for one in arguments]
            output_of_all = call("--debug", name, *given, "--url", url, stdin=b"a\n1\n")
            assert output_of_all.code in (2, 3), (url, output_of_all)
            assert "error: " in output_of_all.err
            assert not contains_password(output_of_all.out + output_of_all.err), (url, output_of_all)


@pytest.mark.parametrize("url", FORMS)
@pytest.mark.usefixtures("quiet_again")
def test_doctor_shows_no_password_of_a_url_that_leads_nowhere(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # without Java, or it would be started 138 times
    for more in ((), ("--json",)):
        shown = call("--debug", "doctor", *more, "--url", url)
        assert shown.code in (1, 2), (url, shown)
        assert not contains_password(shown.out + shown.err), (url, shown)


@pytest.mark.parametrize("url", FORMS)
def test_the_error_of_a_bad_url_is_one_line_with_a_remedy(url: str) -> None:
    refused = call("info", url=url)
    assert refused.code in (2, 3)
    assert (refused.out, refused.err.count("\n")) == ("", 1)
    assert refused.err.startswith("error: ")
    assert not contains_password(refused.err)


@pytest.mark.parametrize(
    "words", [("info", "app", "URL"), ("URL",), ("URL", "info"), ("info", "--URL"), ("info", "URL")]
)
def test_a_url_in_a_wrong_place_is_quoted_without_its_password(words: tuple[str, ...], millstream_url: str) -> None:
    shown = call(*(one.replace("URL", f"redis://:{PASSWORD}@h") for one in words), url=millstream_url)
    assert "redis://" in shown.err
    assert not contains_password(shown.out + shown.err)


@pytest.mark.parametrize("sign", "/?#[]")
def test_the_error_of_a_password_that_is_not_encoded_shows_how_to_encode_it(sign: str) -> None:
    refused = call("info", url=f"redis://:a{sign}b@{NOWHERE}")
    assert refused.code == 2
    assert f"%{ord(sign):02X}" in refused.err


def test_an_encoded_password_is_decoded(millstream_fresh_server: EmbeddedServer) -> None:
    millstream_fresh_server.call("CONFIG", "SET", "requirepass", "a/b?c#d[e]f@g:h%i")
    url = millstream_fresh_server.url.replace("://", "://:a%2Fb%3Fc%23d%5Be%5Df%40g%3Ah%25i@")
    assert call("info", url=url).err == "there are no streams\n"


WRONG_URLS = (
    f"redis://:{PASSWORD}/x@{NOWHERE}/0",
    f"redis://:a[{PASSWORD}@{NOWHERE}",
    f"redis://{NOWHERE}/x?password={PASSWORD}",
)


@pytest.mark.parametrize("url", WRONG_URLS)
@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.usefixtures("quiet_again")
def test_a_service_refuses_a_url_without_showing_its_password(name: str, url: str, app: str) -> None:
    refused = call("--debug", name, *(one.replace("APP", app) for one in SERVICES[name]), "--url", url)
    assert refused.code == 2
    assert "is not a Redis URL" in refused.err
    assert not contains_password(refused.out + refused.err)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_waits_for_redis_shows_no_password(name: str, app: str, tmp_path: Path) -> None:
    arguments = [one.replace("APP", app) for one in SERVICES[name]]
    log = tmp_path / "stderr"
    with (
        log.open("wb") as to,
        running(
            "--debug", name, *arguments, "--url", f"redis://me@{NOWHERE}/0?password={PASSWORD}", stderr=to
        ) as process,
    ):
        eventually(lambda: b"refused" in log.read_bytes() or process.poll() is not None, log=log.read_text)
        process.terminate()
        outcome = ended(process)
    assert "refused" in log.read_text()
    assert not contains_password(outcome.out + log.read_text())
