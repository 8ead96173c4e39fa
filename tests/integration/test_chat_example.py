"""examples/chat/run.py: order per session, bursts joined, limits per tenant, and tokens that survive reloads and a kill."""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.redis_client.pipelining import server_time_ms
from millstream.redis_client.replies import mapping_of
from tests.support.applications import Application, serving
from tests.support.browser import Browser, Chromium
from tests.support.commandline import call, reserved_port
from tests.support.gateways import Events
from tests.support.waiting import eventually

pytestmark = [pytest.mark.worker, pytest.mark.router]

EXAMPLE = Path(__file__).parents[2] / "examples/chat/run.py"
SAYS = "I have no idea, but I say it slowly. "
KEYS = HandlerKeys("chat", "answer", "joined")
AT_ONCE, TOKENS_PER_MINUTE = 4, 6_000
"""The limit of the example, for each tenant."""
SOON_S, KEEP_S = 3_600, 86_400


@contextmanager
def chat(url: str | None, log: Path) -> Iterator[Application]:
    with (
        reserved_port() as port,
        serving([sys.executable, str(EXAMPLE), str(port)], f"http://127.0.0.1:{port}", url, log) as found,
    ):
        yield found


def ask(web: Application, session: str, text: str, key: str, tenant: str = "demo") -> str:
    answer = web.http.post(f"/{tenant}/{session}", json={"text": text}, headers={"Idempotency-Key": key})
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


def joined(client: Client, session: str) -> list[tuple[str, str, int]]:
    """The id, the text and the tokens of each prompt of a session after the handler `join`."""
    found = [(entry_id.decode(), mapping_of(pairs)) for entry_id, pairs in client.execute("XRANGE", "joined", "-", "+")]
    return [
        (entry_id, one[b"text"].decode(), int(one[b"tokens"]))
        for entry_id, one in found
        if one[b"session"] == session.encode()
    ]


def has_joined(client: Client, session: str, count: int) -> bool:
    return len(joined(client, session)) == count


def all_texts(client: Client, session: str) -> str:
    return " ".join(text for _, text, _ in joined(client, session))


def limited_keys(client: Client) -> list[str]:
    """The sessions that wait for the limit of their tenant, as operators see it."""
    shown = call("key", "list", "chat.answer", "--json", url=client.url)
    return sorted(one["key"] for one in shown.json_lines() if one["limit"] is not None)


def test_prompts_of_a_session_are_answered_in_order_and_a_client_that_is_cut_off_misses_no_token(
    client: Client, tmp_path: Path
) -> None:
    with chat(client.url, tmp_path / "log") as web:
        screen, again = Screen(), Screen()
        first = ask(web, "a", "word0", key="a-0")
        assert ask(web, "a", "word0", key="a-0") == first, "a repeated request is published once"
        ask(web, "b", "other", key="b-0")
        screen.read(web, "a", 1)
        for n in (1, 2):  # each when the one before is answered already, so that it is not joined to that
            ask(web, "a", f"word{n}", key=f"a-{n}")
            eventually(partial(has_joined, client, "demo.a", n + 1), "the next prompt")
        wanted = {entry_id: said(n + 1, f"word{n}") for n, (entry_id, _, _) in enumerate(joined(client, "demo.a"))}
        count = sum(len(text.split()) for text in wanted.values())
        for part in (20, count - 21):
            screen.read(web, "a", part)
        again.read(web, "a", count)
        assert screen.answers == again.answers == wanted
        assert list(screen.answers) == list(wanted), "in the order of the prompts"
        eventually(lambda: len(answers(client)) == 4, "all answers")
    found = answers(client)
    assert [one for one in found if one[0] == "demo.a"] == [
        ("demo.a", str(n + 1), said(n + 1, f"word{n}")) for n in range(3)
    ]
    assert [one for one in found if one[0] == "demo.b"] == [("demo.b", "1", said(1, "other"))]


def test_a_burst_of_a_session_becomes_one_prompt_with_the_tokens_of_all(client: Client, tmp_path: Path) -> None:
    fields = [
        ("session", f"{one}.s", "tenant", one, "text", f"{one} {n}", "tokens", 2) for n in range(3) for one in "az"
    ]
    client.pipeline([("XADD", "prompts", "*", *one) for one in fields])
    with chat(client.url, tmp_path / "log"):
        eventually(lambda: len(answers(client)) == 2, "both answers", log=(tmp_path / "log").read_text)
    assert sorted(answers(client)) == [(f"{one}.s", "1", said(1, f"{one} 0 {one} 1 {one} 2")) for one in "az"]
    assert [joined(client, f"{one}.s")[0][2] for one in "az"] == [6, 6]


def test_a_tenant_at_its_limit_is_held_up_and_no_other_tenant_is_and_every_session_keeps_its_order(
    client: Client, tmp_path: Path
) -> None:
    held, sessions, count = KEYS.permits(b"acme"), ("a", "b"), 3
    until_ms = server_time_ms(client) + 3_600_000
    for n in range(AT_ONCE):  # as runs of another process hold them
        client.execute("HSET", held, f"run{n} 1-0", f"t{until_ms}")
    with chat(client.url, tmp_path / "log") as web:
        for n in range(count):
            for session in sessions:
                ask(web, session, f"{session} {n}", key=f"{n}", tenant="acme")
        waiting = [f"acme.{session}" for session in sessions]
        eventually(lambda: answers(client) or limited_keys(client) == waiting, "the keys that wait for the limit")
        ask(web, "a", "three more words", key="0", tenant="zeta")
        eventually(lambda: answers(client), "the answer to the other tenant")
        assert answers(client) == [("zeta.a", "1", said(1, "three more words"))]
        client.execute("DEL", held)
        wanted = {f"acme.{one}": " ".join(f"{one} {n}" for n in range(count)) for one in sessions}
        eventually(lambda: all(all_texts(client, one) == text for one, text in wanted.items()), "all prompts")
        eventually(lambda: len(answers(client)) == client.execute("XLEN", "joined"), "all answers")
    for session in wanted:
        said_in_order = [(session, f"{n}", said(n, text)) for n, (_, text, _) in enumerate(joined(client, session), 1)]
        assert [one for one in answers(client) if one[0] == session] == said_in_order


def test_the_limit_counts_the_tokens_of_a_prompt(client: Client, tmp_path: Path) -> None:
    with chat(client.url, tmp_path / "log") as web:
        ask(web, "a", "word", key="0")
        fields = ("session", "demo.b", "tenant", "demo", "text", "word", "tokens", TOKENS_PER_MINUTE + 1)
        client.execute("XADD", "joined", "*", *fields)
        eventually(lambda: client.execute("XLEN", KEYS.dead_letters) or len(answers(client)) == 2, "its dead letter")
        (letter,) = call("dlq", "list", "chat.answer", "--json", url=client.url).json_lines()
        assert (letter["key"], letter["reason"]) == ("demo.b", "undecodable")
        assert f"a cost from 0 to {TOKENS_PER_MINUTE}" in letter["error"]
        eventually(lambda: answers(client), "the answer to the other session")


def test_a_session_goes_on_after_a_kill_in_mid_answer_and_each_answer_is_committed_once(
    client: Client, tmp_path: Path
) -> None:
    screen = Screen()
    with chat(client.url, tmp_path / "log") as web:
        ask(web, "a", "word0", key="a-0")
        screen.read(web, "a", 1)
        ask(web, "a", "word1", key="a-1")
        screen.read(web, "a", 2)
        web.process.kill()
        web.wait()
    wanted = [("demo.a", str(n + 1), said(n + 1, f"word{n}")) for n in range(2)]
    with chat(client.url, tmp_path / "next") as web:
        eventually(lambda: len(answers(client)) == 2, "both answers", log=(tmp_path / "next").read_text)
        while list(screen.answers.values()) != [text for _, _, text in wanted]:
            screen.read(web, "a", 1)
    assert answers(client) == wanted
    assert list(screen.answers) == [entry_id for entry_id, _, _ in joined(client, "demo.a")]


def test_the_tokens_of_a_session_expire_so_long_after_its_last_prompt(client: Client, tmp_path: Path) -> None:
    with chat(client.url, tmp_path / "log") as web:
        ask(web, "a", "word", key="a-0")
        eventually(lambda: answers(client), "the first answer")
        assert client.execute("TTL", "tokens.demo.a") > 0
        assert client.execute("EXPIRE", "tokens.demo.a", SOON_S)
        ask(web, "a", "word", key="a-1")
        eventually(lambda: len(answers(client)) == 2, "the second answer")
        assert SOON_S < client.execute("TTL", "tokens.demo.a") <= KEEP_S


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
