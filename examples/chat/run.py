"""Chat: a web server, a worker and live streams of tokens in one process; the page is beside this file.

    python examples/chat/run.py [PORT]

It starts a redis-server of its own, or uses that of MILLSTREAM_URL. The prompts of a session are answered one after
another, in order; those of other sessions at the same time. Reload the page in the middle of an answer: no token is
missing.
"""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Body, FastAPI, Header, Request, Response
from fastapi.responses import FileResponse
from pydantic import StringConstraints

from millstream import App, Message, State
from millstream.producer import Producer
from millstream.redis_client import EmbeddedServer
from millstream.services.gateway import EmbeddedGateway
from millstream.worker import EmbeddedWorker

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
app = App("chat")


@dataclass
class Prompt:
    """A prompt, an entry of the stream of its tenant."""

    session: str
    text: str


@functools.cache
def producer() -> Producer:
    """The one producer of this process, for its routes and its handler."""
    return Producer()


async def generate(text: str, turn: int) -> AsyncIterator[str]:
    """Stand for a language model: it knows nothing, and says so word by word."""
    for word in f"This is answer {turn}. You said: {text} I have no idea, but I say it slowly.".split():
        await asyncio.sleep(0.05)
        yield f"{word} "


@app.handler(pattern="prompts.*", key="session", rate=5, into="answers")
async def answer(prompt: Prompt, message: Message, state: State) -> dict[str, object]:
    """Answer the next prompt of a session; of each tenant, at most five prompts a second begin.

    Tokens are published as they come. If the process is killed, the prompt is run again, and `begins` tells the page to
    drop what it has shown of the answer. The whole answer and the state are committed once.
    """
    tokens = f"tokens.{message.stream.removeprefix('prompts.')}.{prompt.session}"
    turn = state["turns"] = state.get("turns", 0) + 1
    await producer().publish_async(tokens, {"prompt": message.id, "begins": prompt.text})
    words = []
    async for word in generate(prompt.text, turn):
        words.append(word)
        await producer().publish_async(tokens, {"prompt": message.id, "token": word})
    return {"session": prompt.session, "turn": turn, "prompt": message.id, "text": "".join(words)}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, object]]:
    """Publish, stream and process while the application serves."""
    url = os.environ["MILLSTREAM_URL"]
    async with producer(), EmbeddedGateway(url) as gateway, EmbeddedWorker(app, url, name="chat"):
        yield {"gateway": gateway}


api = FastAPI(lifespan=lifespan)


@api.get("/")
async def page() -> FileResponse:
    """The page."""
    return FileResponse(Path(__file__).with_name("index.html"))


@api.post("/{tenant}/{session}", status_code=202)
async def ask(
    tenant: Name, session: Name, text: Annotated[str, Body(embed=True)], idempotency_key: Annotated[str, Header()]
) -> str:
    """Publish a prompt, once for each key; an application takes the tenant from its login."""
    return await producer().publish_async(f"prompts.{tenant}", Prompt(session, text), dedupe_id=idempotency_key)


@api.get("/{tenant}/{session}")
async def follow(tenant: Name, session: Name, request: Request) -> Response:
    """Stream the tokens of a session: from its beginning, or from where the browser was cut off."""
    gateway: EmbeddedGateway = request.state.gateway
    return gateway.events(request, f"tokens.{tenant}.{session}", after="earliest", principal=tenant)


def main(port: int = 8000) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    with ExitStack() as stack:
        if "MILLSTREAM_URL" not in os.environ:
            os.environ["MILLSTREAM_URL"] = stack.enter_context(EmbeddedServer()).url
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises it again after its end
        uvicorn.run(api, host="127.0.0.1", port=port, timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
