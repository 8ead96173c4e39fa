"""`millstream bench`: measures the messages per second on this machine and this Redis, with and without millstream."""

import ipaddress
import threading
from dataclasses import asdict
from typing import Annotated

import typer

from millstream.admin.server_checks import Server, read_servers
from millstream.admin.time_inputs import Duration
from millstream.cli.bench_rounds import MESSAGES, PAYLOAD_BYTES, BenchRounds, Rates
from millstream.cli.options import Json, Url, Yes, duration
from millstream.cli.signals import orderly_stop
from millstream.cli.terminal import confirm, print_json, print_message, print_table
from millstream.errors import ConfigError, MillstreamError, RedisError
from millstream.redis_client import DEFAULT_URL
from millstream.redis_client.client import Client
from millstream.redis_client.formats import format_size, pluralize
from millstream.redis_client.redaction import redact_url
from millstream.redis_client.urls import split_url

For = Annotated[Duration, duration("--for", "Time for which it measures, about.", least="1s")]

_NEEDED_BYTES = 64_000_000
_NAMES = {"raw": "redis-py, read and ack", "plain": "worker, no key", "keyed": "worker, by key"}


def bench(measured: For = Duration("10s"), yes: Yes = False, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Measure messages per second of a raw redis-py loop and of a worker, without and with a key.

    It writes to Redis, under keys of its own, and removes them at the end, also after Ctrl-C. It asks first if Redis is
    on another machine or holds other data: it takes all that Redis can do meanwhile.
    """
    if split_url(url).scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("this measures one server: give --url the address of a primary, such as redis://HOST:6379/0")
    with Client(url) as client:
        (server,) = read_servers(client)
        _check_memory(server)
        if reasons := _reasons_to_ask(client, url):
            confirm(
                f"{redact_url(url)} {' and '.join(reasons)}. For about {measured} it would be kept busy with writes "
                "and reads, under keys that are removed at the end. Go on?",
                yes=yes,
            )
        with orderly_stop() as stopping:
            found = _measure(client, stopping, measured)
    if found is None:
        print_message("it was stopped before all was measured")
        raise typer.Exit(1)
    rounds, rates = found
    if as_json:
        print_json(
            {
                "server": server.product,
                "rounds": rounds,
                "messages": MESSAGES,
                "payload_bytes": PAYLOAD_BYTES,
                "raw_per_s": round(rates.raw),
                "worker_per_s": round(rates.plain),
                "worker_ratio": round(rates.plain / rates.raw, 3),
                "keyed_per_s": round(rates.keyed),
                "keyed_ratio": round(rates.keyed / rates.raw, 3),
            }
        )
    else:
        _print(rates)


def _measure(client: Client, stopping: threading.Event, seconds: float) -> tuple[int, Rates] | None:
    rounds = BenchRounds(client, stopping)
    print_message(f"its keys have {rounds.name} in their names, and are removed at the end")
    try:
        return rounds.run(
            seconds, lambda number, what, rate: print_message(f"round {number}: {_NAMES[what]}: {rate:,.0f} messages/s")
        )
    finally:
        try:
            rounds.remove()
        except RedisError:
            print_message(f"its keys could not be removed; later: redis-cli --scan --pattern '*{rounds.name}*'")
            raise


def _print(rates: Rates) -> None:
    rows = [(_NAMES[what], f"{rate:,.0f}", f"{rate / rates.raw:.2f}") for what, rate in asdict(rates).items()]
    print_table(("one process", ">messages/s", ">of redis-py"), rows)


def _check_memory(server: Server) -> None:
    used, limit = server.number("used_memory"), server.number("maxmemory")
    if limit and limit - used < _NEEDED_BYTES:
        raise MillstreamError(
            f"Redis has {format_size(max(0, limit - used))} left up to maxmemory, and this needs up to "
            f"{format_size(_NEEDED_BYTES)}: choose another Redis, such as that of `millstream dev`"
        )


def _reasons_to_ask(client: Client, url: str) -> list[str]:
    """Why measuring may disturb others."""
    reasons = [] if is_local(url) else ["is on another machine"]
    count = client.execute("DBSIZE")
    return [*reasons, f"holds {pluralize(count, 'key')}"] if count else reasons


def is_local(url: str) -> bool:
    """Whether the address in the URL of a server is one of this machine; a name other than localhost is not."""
    parts = split_url(url)
    if parts.scheme == "unix" or parts.hostname in (None, "localhost"):
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False  # a name
