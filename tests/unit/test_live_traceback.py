"""live_traceback: shows where a handler is in a run that has not ended, in threads and tasks."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millstream import App, Message
from millstream.handlers.attempt import attempt, attempt_batch_plain, attempt_plain
from millstream.handlers.handler import Handler
from millstream.handlers.live_traceback import describe_traceback, live_traceback
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.worker]

HERE = Message("in", "1-0", [b"a", b"b"])
OTHER = Message("in", "2-0", [b"a", b"b"])


def make(function: Callable[..., Any], **options: Any) -> Handler:
    app = App("app")
    app.handler("in", name="handle", **options)(function)
    return app.handlers["handle"]


def shown(message: Message, tasks: list[asyncio.Task[Any]] | None = None) -> str:
    return describe_traceback(live_traceback(message.stream, message.id, tasks or ()))


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_plain_handler_is_shown_with_what_it_calls_and_without_the_frames_above_it(in_batch: bool) -> None:
    inside, release = threading.Event(), threading.Event()

    def wait_for_the_gateway() -> None:
        inside.set()
        release.wait(FAIL_SAFE_S)

    def handle(message: Message) -> None:
        wait_for_the_gateway()

    def handle_all(messages: list[Message]) -> None:
        wait_for_the_gateway()

    if in_batch:
        handler = make(handle_all, batch_size=2)
        thread = threading.Thread(target=attempt_batch_plain, args=(handler, [OTHER, HERE]))
    else:
        thread = threading.Thread(target=attempt_plain, args=(make(handle), HERE, b""))
    thread.start()
    try:
        eventually(inside.is_set)
        eventually(lambda: "release.wait" in shown(HERE), "the wait in its traceback", log=lambda: shown(HERE))
        text = shown(HERE)
    finally:
        release.set()
        thread.join()
    assert "wait_for_the_gateway" in text
    assert "release.wait" in text
    assert "attempt.py" not in text
    assert shown(HERE) == "", "once it has ended"


def test_another_message_of_the_same_handler_is_not_confused_with_it() -> None:
    seen: list[str] = []

    def handle(message: Message) -> None:
        seen.append(shown(OTHER))

    attempt_plain(make(handle), HERE, b"")
    assert seen == [""]


def test_an_async_handler_that_waits_is_shown_down_to_what_it_awaits() -> None:
    async def ask_the_gateway() -> None:
        await asyncio.sleep(FAIL_SAFE_S)

    async def handle(message: Message) -> None:
        await ask_the_gateway()

    async def run() -> str:
        task = asyncio.create_task(attempt(make(handle), HERE, b""))
        await asyncio.sleep(0)
        text = shown(HERE, [task])
        task.cancel()
        await asyncio.wait([task])
        return text

    text = asyncio.run(run())
    assert "ask_the_gateway" in text
    assert "asyncio.sleep(FAIL_SAFE_S)" in text
    assert "attempt.py" not in text


def test_an_async_handler_that_blocks_its_loop_is_shown_where_it_blocks() -> None:
    inside, release = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        release.wait(FAIL_SAFE_S)

    async def handle(message: Message) -> None:
        block()

    thread = threading.Thread(target=lambda: asyncio.run(attempt(make(handle), HERE, b"")))
    thread.start()
    try:
        eventually(inside.is_set)
        text = shown(HERE)
    finally:
        release.set()
        thread.join()
    assert "in block\n" in text
