"""A web application with a worker inside, for tests that run it on uvicorn. A message says by `do` what it does.

`hang`: it runs beyond its time limit, and on. `wait`: it runs until the key `gate` exists.
"""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request

from millstream import App, Message
from millstream.producer import Producer
from millstream.redis_client.client import Client
from millstream.worker import EmbeddedWorker, WorkerPolicy

URL = os.environ["MILLSTREAM_URL"]
STOP_MS = int(os.environ.get("MILLSTREAM_TEST_STOP_MS", "60000"))

app = App("inside")


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


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    """Publish and process while the application serves."""
    with Producer(URL) as api.state.producer:
        async with EmbeddedWorker(app, URL, policy=WorkerPolicy(stop_ms=STOP_MS)):
            yield


api = FastAPI(lifespan=lifespan)


@api.post("/in")
async def publish(message: dict[str, str], request: Request) -> str:
    """Publish a message."""
    producer: Producer = request.app.state.producer
    return await producer.publish_async("in", message)
