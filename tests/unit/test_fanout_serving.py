"""What the server process does beside serving."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.fanout import serving
from millstream.fanout.access import Access, stream_tokens

pytestmark = [pytest.mark.router]

OLD, NEW = "0123456789abcdef-old", "0123456789abcdef-new"


def test_a_token_file_that_changes_while_the_server_starts_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LOOK_S", 0.01)
    path = tmp_path / "tokens"
    path.write_text(f"{OLD} *\n")
    tokens = stream_tokens()
    tokens.read(path)
    path.write_text(f"{NEW} *\n")

    async def body() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(serving._follow_file(Access(tokens), path), 0.2)

    asyncio.run(body())
    assert tokens.find(OLD) is None
    assert tokens.find(NEW) is not None
