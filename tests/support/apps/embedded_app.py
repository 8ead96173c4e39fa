"""A web application with a worker and live streams inside, on uvicorn. A message of `in` says by `do` what it does.

`hang`: it runs beyond its time limit, and on. `wait`: it runs until the key `gate` exists.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from millstream import App, Message, State
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.services.gateway import ConnectionLimits, EmbeddedGateway, FlowControl
from millstream.worker import EmbeddedWorker, WorkerPolicy

URL = os.environ["MILLSTREAM_URL"]
STOP_MS = int(os.environ.get("MILLSTREAM_TEST_STOP_MS", "60000"))
CLAIM_MS = int(os.environ.get("MILLSTREAM_TEST_CLAIM_MS", "30000"))
STALL_S = float(os.environ.get("MILLSTREAM_TEST_STALL_S", "3600"))

app = App("inside")
gateway: EmbeddedGateway


@app.handler("in", into="out", time_limit_ms=int(os.environ.get("MILLSTREAM_TEST_LIMIT_MS", "600000")))
def copy(message: Message) -> dict[str, str]:
    """Copy the number of a message."""
    deed = message.text("do")
    with Client(URL) as client:
        if deed:
            client.execute("SET", "runs", os.getpid())
        while deed == "hang" or (deed == "wait" and not client.execute("EXISTS", "gate")):
            time.sleep(0.01)
    return {"n": message.text("n", "")}


@app.handler("numbers", key="k", into="counts")
def count(message: Message, state: State) -> dict[str, object]:
    """Count the messages of a key."""
    time.sleep(0.002)
    state["count"] = state.get("count", 0) + 1
    return {"k": message.fields["k"], "n": message.fields["n"], "count": state["count"]}


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    """Publish, process and stream while the application serves."""
    global gateway
    flow, limits = FlowControl(stall_s=STALL_S), ConnectionLimits(per_token=2)
    async with (
        Producer(URL) as api.state.producer,
        EmbeddedGateway(URL, flow=flow, limits=limits) as gateway,
        EmbeddedWorker(app, URL, policy=WorkerPolicy(claim_ms=CLAIM_MS, stop_ms=STOP_MS)),
    ):
        yield


api = FastAPI(lifespan=lifespan)


@api.post("/in")
async def publish(message: dict[str, str], request: Request) -> str:
    """Publish a message."""
    producer: Producer = request.app.state.producer
    return await producer.publish_async("in", message)


@api.get("/events/{streams}")
@api.post("/events/{streams}")
async def events(streams: str, request: Request, user: str = "") -> Response:
    """Follow streams, whose names commas separate, from their beginning."""
    return gateway.events(request, *streams.split(","), after="earliest", principal=user)


@api.get("/subscriptions")
async def subscriptions() -> int:
    """How many streams are followed."""
    return gateway.router.figures().subscriptions
