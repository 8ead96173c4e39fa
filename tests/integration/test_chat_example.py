"""examples/chat/run.py: prompts of a session are answered in order, and its tokens survive reloads and a kill."""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.replies import mapping_of
from tests.support.applications import Application, serving
from tests.support.browser import Browser, Chromium
from tests.support.commandline import free_port
from tests.support.gateways import Events
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.router]

EXAMPLE = Path(__file__).parents[2] / "examples/chat/run.py"
SAYS = "I have no idea, but I say it slowly. "


@contextmanager
def chat(url: str | None, log: Path) -> Iterator[Application]:
    port = free_port()
    with serving([sys.executable, str(EXAMPLE), str(port)], f"http://127.0.0.1:{port}", url, log) as found:
        yield found


def ask(web: Application, session: str, text: str, key: str) -> str:
    answer = web.http.post(f"/demo/{session}", json={"text": text}, headers={"Idempotency-Key": key})
    assert answer.status_code == 202, answer.text
    return str(answer.json())


class Screen:
    """What a page that follows a session shows: the answer to each prompt."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.position = ""

    def read(self, web: Application, session: str, tokens: int) -> None:
        """Connect, as a browser does that was cut off at `position`; read so many tokens; disconnect."""
        headers = {"Last-Event-ID": self.position} if self.position else {}
        with Events(web.url, f"/demo/{session}", headers) as events:
            while tokens:
                (event,) = events.next()
                fields: Mapping[str, str] = event.data["fields"]
                self.position = event.id
                if "begins" in fields:
                    self.answers[fields["prompt"]] = ""
                else:
                    self.answers[fields["prompt"]] += fields["token"]
                    tokens -= 1


def said(turn: int, text: str) -> str:
    return f"This is answer {turn}. You said: {text} {SAYS}"


def answers(client: Client) -> list[tuple[str, str, str]]:
    """The session, turn and text of each whole answer, in the order in which they were committed."""
    found = [mapping_of(pairs) for _, pairs in client.execute("XRANGE", "answers", "-", "+")]
    return [(one[b"session"].decode(), one[b"turn"].decode(), one[b"text"].decode()) for one in found]


def test_prompts_of_a_session_are_answered_in_order_and_a_client_that_is_cut_off_misses_no_token(
    client: Client, tmp_path: Path
) -> None:
    with chat(client.url, tmp_path / "log") as web:
        prompts = [ask(web, "a", f"word{n}", key=f"a-{n}") for n in range(3)]
        assert ask(web, "a", "word1", key="a-1") == prompts[1], "a repeated request is published once"
        ask(web, "b", "other", key="b-0")
        wanted = {prompt: said(n + 1, f"word{n}") for n, prompt in enumerate(prompts)}
        count = sum(len(text.split()) for text in wanted.values())
        screen, again = Screen(), Screen()
        for part in (1, 20, count - 21):
            screen.read(web, "a", part)
        again.read(web, "a", count)
        assert screen.answers == again.answers == wanted
        assert list(screen.answers) == prompts, "in the order of the prompts"
        eventually(lambda: len(answers(client)) == 4, "all answers")
    found = answers(client)
    assert [one for one in found if one[0] == "a"] == [("a", str(n + 1), said(n + 1, f"word{n}")) for n in range(3)]
    assert [one for one in found if one[0] == "b"] == [("b", "1", said(1, "other"))]


def test_a_session_goes_on_after_a_kill_in_mid_answer_and_each_answer_is_committed_once(
    client: Client, tmp_path: Path
) -> None:
    screen = Screen()
    with chat(client.url, tmp_path / "log") as web:
        prompts = [ask(web, "a", f"word{n}", key=f"a-{n}") for n in range(2)]
        screen.read(web, "a", 3)
        web.process.kill()
        web.wait()
    wanted = [("a", str(n + 1), said(n + 1, f"word{n}")) for n in range(2)]
    with chat(client.url, tmp_path / "next") as web:
        eventually(lambda: len(answers(client)) == 2, "both answers", log=(tmp_path / "next").read_text)
        while list(screen.answers.values()) != [text for _, _, text in wanted]:
            screen.read(web, "a", 1)
    assert answers(client) == wanted
    assert list(screen.answers) == prompts


def test_a_name_that_could_reach_other_streams_is_refused(client: Client, tmp_path: Path) -> None:
    with chat(client.url, tmp_path / "log") as web:
        for path in ("/demo/a.b", "/demo/A", "/de.mo/a", "/demo/*"):
            assert web.http.get(path).status_code == 422, path
        assert web.http.post("/demo/a", json={"text": "x"}).status_code == 422, "a prompt without a key"


def test_the_page_shows_the_same_answer_after_it_is_reloaded_in_the_middle_of_it(
    client: Client, tmp_path: Path, chromium: Chromium
) -> None:
    with chat(client.url, tmp_path / "log") as web, Browser(f"{web.url}/#session", chromium) as browser:
        text = "Array.from(document.querySelectorAll('#chat *'), one => one.textContent).join('|')"
        eventually(lambda: browser.run("document.readyState === 'complete' && document.forms.length"), "the page")
        browser.run("document.forms[0].elements[0].value = '<b>hello</b>'; document.forms[0].requestSubmit()")
        eventually(lambda: "This is" in (browser.run(text) or ""), "the beginning of an answer")
        browser.run("location.reload()")
        whole = f"<b>hello</b>|{said(1, '<b>hello</b>')}"
        eventually(lambda: browser.run(text) == whole, "the whole answer", log=lambda: browser.run(text))


def test_one_command_starts_the_example_with_a_redis_of_its_own_and_sigterm_stops_both(tmp_path: Path) -> None:
    with chat(None, tmp_path / "log") as web:
        servers = [child for child in psutil.Process(web.process.pid).children() if "server" in child.name()]
        assert len(servers) == 1
        ask(web, "a", "word", key="a-0")
        Screen().read(web, "a", 1)
        web.process.send_signal(signal.SIGTERM)
        assert web.wait() == 0, web.log.read_text()
        eventually(lambda: not servers[0].is_running(), "the end of its Redis")
        assert "Application shutdown complete" in web.log.read_text()
