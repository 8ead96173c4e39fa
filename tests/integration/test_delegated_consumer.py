"""A Python consumer whose report of a failed message no master accepts, or that has a text no master would accept."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.errors import Reject
from millstream.model import Message
from millstream.redis_client.client import Client
from millstream.services.master import delegated_consumer
from millstream.services.master.delegated_consumer import ConsumerSettings, DelegatedConsumer
from tests.support.masters import GROUP, PATIENT, STREAM, TOKEN, HealthPage, Master, is_clean, publish
from tests.support.waiting import eventually

pytestmark = [pytest.mark.master, pytest.mark.xdist_group("master")]

HOUR_MS = 3_600_000.0


@contextmanager
def consuming(function: Callable[[Message], None], url: str, master: Master, *, token: str = TOKEN) -> Iterator[None]:
    stopping = threading.Event()
    with HealthPage() as health:
        settings = ConsumerSettings(
            url=url,
            ticket_stream=STREAM,
            group=GROUP,
            consumer="c1",
            register_urls=[f"{master.url}/api/consumers/register"],
            acknowledge_urls=[f"{master.url}/api/messages/acknowledge"],
            health_url=health.url,
            token=token,
            max_tickets=2,
        )
        thread = threading.Thread(target=DelegatedConsumer(function, settings, stopping).run)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


class FailingTicket:
    """A function that fails on ticket A, and counts its runs on each."""

    def __init__(self) -> None:
        self.runs = {"A": 0, "B": 0}

    def __call__(self, message: Message) -> None:
        ticket = message.fields["ticket_id"].decode()
        self.runs[ticket] += 1
        if ticket == "A":
            raise ValueError("nonsense")


class ErrorWithoutText(Exception):
    """An error that ends the process of whatever asks for its text."""

    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize("text", ["x" * 5_000, "\ud800" * 4_000, "caf\udce9"], ids=["long", "long-surrogates", "short"])
def test_an_error_of_any_text_is_reported(text: str, millstream_url: str, client: Client) -> None:
    runs: list[str] = []

    def reject(message: Message) -> None:
        runs.append(message.id)
        raise Reject(text)

    with Master(millstream_url, *PATIENT) as master:
        (bad,) = publish(client, "A")
        with consuming(reject, millstream_url, master):
            eventually(lambda: runs and is_clean(client), "the dead letter")
    assert runs == [bad]


def test_a_message_whose_failure_is_refused_does_not_run_again_before_its_wait_ends(
    millstream_url: str,
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(delegated_consumer, "_RERUN_WAITS_MS", (HOUR_MS, HOUR_MS))
    tokens = tmp_path / "tokens"
    tokens.write_text("register-only-0123456789 register\n")
    function = FailingTicket()
    with Master(millstream_url, *PATIENT, "--token-file", str(tokens)) as master:
        publish(client, "A", "B")
        with consuming(function, millstream_url, master, token="register-only-0123456789"):
            eventually(lambda: "a master refused fail" in caplog.text, "the refusal")
            for _ in range(3):
                publish(client, "B")
            eventually(lambda: function.runs["B"] == 4, "the newer messages")
    assert function.runs["A"] == 1
    assert caplog.text.count("runs again after 3600 s") == 1


def test_an_unexpected_error_of_the_consumer_is_logged_and_the_message_runs_again_later(
    millstream_url: str, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delegated_consumer, "_RERUN_WAITS_MS", (1.0, 1.0))
    runs: list[str] = []

    def fail_once(message: Message) -> None:
        runs.append(message.id)
        if len(runs) == 1:
            raise ErrorWithoutText

    with Master(millstream_url, *PATIENT) as master:
        (bad,) = publish(client, "A")
        with consuming(fail_once, millstream_url, master):
            eventually(lambda: len(runs) == 2 and is_clean(client), "a second run")
    assert runs == [bad, bad]
    (warning,) = [one for one in caplog.records if "unexpected error: SystemExit" in one.getMessage()]
    assert warning.levelno == logging.WARNING
    assert warning.exc_info
