"""Token files that change while a service runs."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.services.gateway.auth import Authorizer, new_stream_tokens
from millstream.services.web import token_reload
from millstream.services.web.errors import Refused
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.router]

OLD, NEW = "0123456789abcdef-old", "0123456789abcdef-new"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_reload, "_RELOAD_S", 0.01)


async def following(access: Authorizer, path: Path, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `body` while the file is followed."""
    task = asyncio.create_task(token_reload.reload_tokens(access.reload, path))
    try:
        await body()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_token_file_that_changes_while_the_server_starts_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{OLD} *\n")
    tokens = new_stream_tokens()
    tokens.read(path)
    path.write_text(f"{NEW} *\n")

    async def body() -> None:
        await eventually_async(lambda: tokens.find(NEW) is not None, "the new token")
        assert tokens.find(OLD) is None

    asyncio.run(following(Authorizer(tokens), path, body))


def test_a_token_file_that_does_not_exist_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(ConfigError) as refusal:
        new_stream_tokens().read(path)
    assert str(refusal.value) == f"the token file {str(path)!r} cannot be read: No such file or directory"


@pytest.mark.parametrize("mistake", ["", "short *\n"])
def test_a_mistake_in_the_token_file_keeps_the_previous_tokens(
    tmp_path: Path, mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{OLD} *\n")
    tokens = new_stream_tokens()
    access = Authorizer(tokens)

    async def body() -> None:
        await eventually_async(lambda: tokens.find(OLD) is not None, "the first token")
        path.write_text(mistake)
        await eventually_async(lambda: "keeping the previous tokens" in caplog.text, "a look at the mistake")
        assert access.authorize(["s"], token=OLD, ticket=None)
        with pytest.raises(Refused):
            access.authorize(["s"], token=None, ticket=None)
        path.write_text(f"{NEW} *\n")
        await eventually_async(lambda: tokens.find(NEW) is not None, "the mistake to be mended")

    with caplog.at_level(logging.WARNING):
        asyncio.run(following(access, path, body))
