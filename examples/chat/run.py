"""Chat: a web server, a worker and live streams of tokens in one process; the page is beside this file.

python examples/chat/run.py [PORT]     # with a redis-server of its own, or that of MILLSTREAM_URL
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

from millstream import App, Limit, Message, State
from millstream.producer import Producer
from millstream.redis_client import Client, EmbeddedServer
from millstream.services.gateway import EmbeddedGateway
from millstream.worker import EmbeddedWorker

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]
Text = Annotated[str, Body(embed=True, max_length=1_000)]
app = App("chat")
client = functools.cache(lambda: Client(os.environ["MILLSTREAM_URL"]))  # one for this process, and one producer
producer = functools.cache(lambda: Producer(client()))
KEEP_S = 24 * 3_600  # the tokens of a session go so long after its last prompt


@dataclass
class Prompt:
    """A prompt, or a burst of them. `session` begins with the tenant, as those of two tenants may have one name."""

    session: str
    tenant: str
    text: str
    tokens: int


async def generate(text: str, turn: int) -> AsyncIterator[str]:
    """Stand for a language model: it knows nothing, and says so word by word."""
    for word in f"This is answer {turn}. You said: {text} I have no idea, but I say it slowly.".split():
        await asyncio.sleep(0.05)
        yield f"{word} "


@app.handler("prompts", key="session", batch_size=10, batch_wait_ms=300, into="joined")
def join(prompts: list[Prompt]) -> Prompt:
    """Join the prompts of a session that come within 300 ms, of at most a minute of the limit in all."""
    texts, tokens = [one.text for one in prompts], sum(one.tokens for one in prompts)
    return Prompt(prompts[0].session, prompts[0].tenant, " ".join(texts), tokens)


@app.handler(
    "joined", key="session", into="answers", limit=Limit(per="tenant", at_once=4, rate="6000/m", cost="tokens")
)
async def answer(prompt: Prompt, message: Message, state: State) -> dict[str, object]:
    """Answer a prompt, token by token. After a kill that begins again, and `begins` tells the page to drop the old ones."""
    tokens, words = f"tokens.{prompt.session}", []
    turn = state["turns"] = state.get("turns", 0) + 1
    await producer().publish_async(tokens, {"prompt": message.id, "begins": prompt.text})
    await asyncio.to_thread(client().execute, "EXPIRE", tokens, KEEP_S)
    async for word in generate(prompt.text, turn):
        words.append(word)
        await producer().publish_async(tokens, {"prompt": message.id, "token": word})
    return {"session": prompt.session, "turn": turn, "prompt": message.id, "text": "".join(words)}


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, object]]:
    """Publish, stream and process while the application serves."""
    url = os.environ["MILLSTREAM_URL"]
    with client():
        async with producer(), EmbeddedGateway(url) as gateway, EmbeddedWorker(app, url, name="chat"):
            yield {"gateway": gateway}


api = FastAPI(lifespan=lifespan)


@api.get("/")
async def page() -> FileResponse:
    """The page."""
    return FileResponse(Path(__file__).with_name("index.html"))


@api.post("/{tenant}/{session}", status_code=202)
async def ask(tenant: Name, session: Name, text: Text, idempotency_key: Annotated[str, Header()]) -> str:
    """Publish a prompt, once for each key; an application takes the tenant from its login."""
    prompt = Prompt(f"{tenant}.{session}", tenant, text, tokens=len(text.split()))  # a word stands for a token
    return await producer().publish_async("prompts", prompt, dedupe_id=f"{prompt.session} {idempotency_key}")


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
