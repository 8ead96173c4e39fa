"""Tickets: a business service, a master, and three consumers in two languages, one of which is killed in mid-run.

    python examples/tickets/run.py [TICKETS] [MESSAGES_OF_EACH]

It needs the extra `master`, and starts a redis-server of its own. The business service adds messages to the ticket
stream; the master assigns them to the consumers, one at a time for each ticket. At the end it prints which consumer
processed each step, and a verdict.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import msgspec

from millstream.redis_client import Client, EmbeddedServer
from millstream.testing.history import Event, check, read_events

HERE = Path(__file__).parent
STREAM, GROUP = "tickets", "ticket_workers"
PROGRAM = (sys.executable, "-m", "millstream.cli.main")
WITHIN_S = 600


def main(tickets: int = 6, each: int = 10) -> int:
    """Run the scenario; return 0 if the messages of every ticket were processed in order."""
    token = secrets.token_hex(16)
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer() as server, Client(server.url) as client:
        logs = Path(folder)
        try:
            master = start_master(server.url, token, started)
            consumers = start_consumers(server, master, token, logs, started)
            wait_for_consumers(master, token, len(consumers))
            published = publish(client, tickets, each)
            killed = kill_one(consumers, logs)
            wait_until_done(client, published[-1].id)
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(WITHIN_S)
        return show(published, logs, killed)


def start_master(url: str, token: str, started: list[subprocess.Popen[bytes]]) -> str:
    """Start a master that detects a dead consumer within three seconds; return its URL."""
    options = ("--port", "0", "--ping-interval", "0.5", "--ping-failures", "6", "--json")
    names = {
        "MILLSTREAM_MASTER_TICKET_STREAM": STREAM,
        "MILLSTREAM_MASTER_CONCURRENCY_STREAM_GROUP": GROUP,
        "MILLSTREAM_MASTER_TOKEN": token,
    }
    process = subprocess.Popen(
        [*PROGRAM, "master", "--url", url, *options], env={**os.environ, **names}, stdout=subprocess.PIPE
    )
    started.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:  # it has printed why
        sys.exit(process.wait())
    return str(msgspec.json.decode(line)["url"])


def start_consumers(
    server: EmbeddedServer, master: str, token: str, logs: Path, started: list[subprocess.Popen[bytes]]
) -> dict[str, subprocess.Popen[bytes]]:
    """Start two consumers in Python and, if there is a `node`, one in JavaScript."""
    found = {}
    for name in ("anna", "bert"):
        environment = {
            **os.environ,
            "MILLSTREAM_CONSUMER_TICKET_STREAM": STREAM,
            "MILLSTREAM_CONSUMER_CONCURRENCY_STREAM_GROUP": GROUP,
            "MILLSTREAM_CONSUMER_NAME": name,
            "MILLSTREAM_CONSUMER_MASTER_REGISTER_API_URL": f"{master}/api/consumers/register",
            "MILLSTREAM_MASTER_TOKEN": token,
            "MILLSTREAM_CONSUMER_MASTER_ACKNOWLEDGE_API_URL": f"{master}/api/messages/acknowledge",
            "TICKETS_LOG": str(logs / f"{name}.jsonl"),
            "WORK_MS": "20",
        }
        command = [*PROGRAM, "consumer", f"{HERE}/work.py:work", "--url", server.url, "--poll", "10ms"]
        found[name] = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    node = shutil.which("node")
    if node is not None:
        arguments = ("carl", str(server.port), master, token, STREAM, GROUP, str(logs / "carl.jsonl"))
        found["carl"] = subprocess.Popen(
            [node, str(HERE / "consumer.js"), *arguments], env={**os.environ, "WORK_MS": "20"}
        )
    started += found.values()
    return found


def wait_for_consumers(master: str, token: str, count: int) -> None:
    """Wait until all consumers have registered."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        page = httpx.get(f"{master}/api/consumers", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        if len(page.json()["consumers"]) == count:
            return
        time.sleep(0.05)
    raise SystemExit("the consumers did not all register")


def publish(client: Client, tickets: int, each: int) -> list[Event]:
    """Act as the business service: add the messages of all tickets, interleaved."""
    published = []
    for number in range(each):
        for ticket in range(tickets):
            key = f"T-{ticket + 1}".encode()
            entry_id = client.execute("XADD", STREAM, "*", "ticket_id", key, "step", number)
            published.append(Event(kind="enqueued", stream=STREAM, id=entry_id.decode(), key=key))
    return published


def kill_one(consumers: dict[str, subprocess.Popen[bytes]], logs: Path) -> str:
    """Kill the consumer anna while it processes a message."""
    log = logs / "anna.jsonl"
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        lines = log.read_bytes().splitlines() if log.exists() else []
        if len(lines) > 3 and b'"started"' in lines[-1]:
            consumers["anna"].kill()
            return "anna"
        time.sleep(0.001)
    raise SystemExit("consumer anna received no messages")


def wait_until_done(client: Client, last: str) -> None:
    """Wait until every message is acknowledged."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        group = client.execute("XINFO", "GROUPS", STREAM)[0]
        info = dict(zip(group[::2], group[1::2], strict=True))
        if not info[b"pending"] and info[b"last-delivered-id"] == last.encode():
            return
        time.sleep(0.05)
    raise SystemExit("not all messages were acknowledged in time")


def show(published: list[Event], logs: Path, killed: str) -> int:
    """Print which consumer processed each step, and the verdict."""
    names = {"anna": "A", "bert": "B", "carl": "C"}
    steps = {event.id: number for number, event in enumerate(published)}
    tickets = len({event.key for event in published})
    story: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, letter in names.items():
        for event in read_events(*logs.glob(f"{name}.jsonl")):
            if event.kind in ("started", "committed") and event.key is not None:
                mark = f"{letter}{steps[event.id] // tickets}" + ("?" if event.kind == "started" else "")
                story[event.key.decode()].append((event.at or 0.0, mark))
    out = sys.stdout.write
    out(f"steps by consumer: A anna, B bert (Python), C carl (JavaScript); {killed} was killed; ? not finished\n")
    for ticket, marks in sorted(story.items()):
        ordered = [mark for _, mark in sorted(marks)]
        done = set(ordered)
        shown = [mark for mark in ordered if not (mark.endswith("?") and mark[:-1] in done)]
        out(f"  {ticket}  {' '.join(shown)}\n")
    report = check([*published, *read_events(*logs.glob("*.jsonl"))])
    # Duplicates are allowed: a message that the killed consumer processed but did not acknowledge is processed again.
    in_order = not (report.lost or report.out_of_order or report.overlapping)
    out(f"{report.summary()}\n{'in order' if in_order else 'NOT in order'}\n")
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
