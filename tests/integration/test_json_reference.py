"""Every command prints with --json what docs/reference/json.md says, and the page says nothing else."""

import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream.admin.figure_history import FigureHistory, HandlerSample, Sample
from millstream.balancer import Balancer, BalancerPolicy, StreamAdded
from millstream.delivery.long_runs import LongRun, report_long_runs
from millstream.delivery.query_progress import QueryProgress, report_progress
from millstream.delivery.redrive_reports import RedriveReport, report_redrive
from millstream.delivery.restarts import Restart, record_restart
from millstream.producer.bulk import Publisher
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.key_names import worker_name_key
from millstream.redis_client.pipelining import server_time_ms
from scripts.command_reference import all_commands
from tests.support.commandline import call, start
from tests.support.json_reference import faults, sections, seen
from tests.support.processes import end
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.cli, pytest.mark.xdist_group("json_reference")]

APP = """
from millstream import App, Message, Retry, State

app = App("shop")

@app.handler("orders", key="customer", into="totals", retry=Retry(attempts=1, then="park"))
def total(message: Message, state: State) -> dict[str, object]:
    if message.fields["customer"] == b"mad":
        raise RuntimeError("gateway says no")
    state["n"] = state.get("n", 0) + 1
    return {"n": state["n"]}

@app.handler("orders", retry=Retry(attempts=1))
def plain(message: Message) -> None:
    if message.fields["customer"] == b"bad":
        raise RuntimeError("broken")

@app.handler("bills", key="customer", partitions=2)
def bill(message: Message) -> None: ...

def consume(message: Message) -> None: ...
"""

ELSEWHERE = {
    "auto": "tests/support/automatic.py compares the events of each command",
    "run": "tests/support/drivers.py compares the events of every run",
    "tail": "tests/integration/test_commands_tail.py compares a gap",
    "relay postgres": "tests/integration/test_relay_postgres.py compares what it prints",
    "demo": "tests/spark/test_demo.py compares what it prints",
    "class-archive": "tests/spark/test_class_archive.py compares what it prints",
}
"""Commands with sections that other tests compare, and where."""

ALWAYS_JSON = {"state export"}
"""Commands that print nothing else, and have no option for it."""

NOT_SHOWN = {
    "info": {"problems[]"},  # a Redis that refuses writes; test_commands_info has one
    "state list": {"damaged", "expires_ms", "version"},  # test_commands, test_state_ttl, test_state_export
    "state export": {"damaged", "expires_ms", "version"},  # test_state_export has all
    "delayed list": {"problem"},  # forged data: test_hostile_clients
    "dlq list": {"pairs[][]", "fields.*"},  # forged data: test_forged_dead_letters
    "key outputs": {"pairs[][]"},  # names that are not UTF-8
    "dlq show": {"pairs[][]", "before_edit.fields.*", "before_edit.pairs[][]"},  # test_dlq_copies
    "group delete-consumer": {"gone[]"},  # entries that were deleted meanwhile: test_commands_groups
    "group claim": {"deleted[]"},
    "replay: message": {  # names that are not UTF-8
        f"{version}{what}[].pairs[][]" for version in ("", "new.") for what in ("outputs", "timers")
    },
}
"""Fields that are rare, which the commands below do not show."""


class _Outputs:
    """What commands have printed, by section of the page."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.values: dict[str, list[Any]] = defaultdict(list)

    def run(self, section: str, *args: str, code: int = 0) -> list[Any]:
        """Run the command of a section, with these arguments."""
        option = () if section in ALWAYS_JSON else ("--json",)
        shown = call(*section.replace(" --count", "").split(), *args, *option, url=self._url)
        assert shown.code == code, (section, shown)
        found = shown.json_lines()
        assert found, (section, shown)
        self.values[section] += found
        return found

    def service(self, section: str, *args: str) -> None:
        """Start a service, wait for its first event, and end it."""
        process = start(section, *args, "--json", url=self._url, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        with process.stdout as lines:
            self.values[section].append(json.loads(lines.readline()))
            process.send_signal(signal.SIGTERM)
            self.values[section] += [json.loads(line) for line in lines]
        assert process.wait(FAIL_SAFE_S) == 0


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, list[Any]]]:
    """What each command prints, with a worker at work and after it."""
    folder = tmp_path_factory.mktemp("json")
    app = folder / "json_reference_app.py"
    app.write_text(APP)
    with EmbeddedServer(port=0) as server, Client(server.url) as client, pytest.MonkeyPatch.context() as patch:
        for name in ("long_runs", "query_progress", "redrive_reports"):
            patch.setattr(f"millstream.delivery.{name}.HELD_MS", 3_600_000)  # none is reported again
        found = _Outputs(server.url)
        _publish(found, client, folder)
        worker = start(
            "worker", str(app), "--json", "--name", "w", "--metrics-address", "0", url=server.url, stderr=None
        )
        try:
            eventually(
                lambda: '"parked":1' in call("key", "list", "--count", "--json", url=server.url).out, "a parked key"
            )
            eventually(lambda: '"dead_letters":1' in call("info", "--json", url=server.url).out, "a dead letter")
            _show(found, client)
            worker.send_signal(signal.SIGTERM)
            assert worker.stdout is not None
            for line in worker.stdout:
                event = json.loads(line)
                found.values[f"worker: {event['event']}"].append(event)
        finally:
            end(worker)
            assert worker.stdout is not None
            worker.stdout.close()
        steps: tuple[Callable[[_Outputs, Client], None], ...] = (
            _repair,
            _change_groups,
            _change_leases,
            _change_partitions,
        )
        for step in steps:
            step(found, client)
        found.run("check", str(app), "--newest", "--yes", code=1)
        _replay(found, app)
        found.run("acl", "worker")
        found.run("acl", "console", "--stream", "orders", "--into", "totals", "--app", "shop")
        found.run("bench", "--for", "1s", "--yes")
        found.run("init", str(folder / "project"))
        found.run("forget", "shop.plain", "--dry-run")
        _services(found, app, folder)
        yield found.values


def _publish(found: _Outputs, client: Client, folder: Path) -> None:
    for customer in ("ann", "bob", "mad", "mad", "bad"):
        client.execute("XADD", "orders", "*", "customer", customer, "raw", b"\xff")
    file = folder / "lines.jsonl"
    file.write_text('{"a": 1}\n')
    found.run("publish", "p", str(file))
    client.execute("XADD", "p", "*", "twice", "1", "twice", "2")
    found.run("tail", "p", "--no-follow")
    found.run("publish", "p", str(file), "--in", "1h")
    with Publisher(client, "p", delay_ms=3_600_000) as publisher:
        publisher.add(["twice", "twice"], ["1", "2"])
    first, *_ = found.run("delayed list", "p")
    found.run("delayed list --count", "--count")
    found.run("delayed cancel", "p", first["id"], "--yes")


def _show(found: _Outputs, client: Client) -> None:
    record_restart(client, "shop", Restart(worker="w-0", incarnation="i", cause="was killed by signal 9"))
    run = LongRun(
        handler="shop.total", stream="orders", id="1-1", key="ann", worker="w-0", started_ms=1, time_limit_ms=300_000
    )
    report_long_runs(client, "shop", [run])
    client.execute("XGROUP", "CREATE", "orders", "others", "0")
    client.execute("XREADGROUP", "GROUP", "others", "me", "STREAMS", "orders", ">")
    found.run("info")
    found.run("info", "--over", "100ms")
    found.run("key list")
    found.run("key list --count", "--count")
    found.run("key show", "shop.total", "mad")
    report_progress(
        client,
        "shop",
        {"total": QueryProgress(batch=1, rows=5, rows_per_s=2.5, took_ms=9, began_ms=1, ui="http://spark")},
    )
    found.run("top", "--once", "--interval", "100ms")
    figures = HandlerSample(
        streams=1, added=5, done=4, dead=0, lag=1, oldest_ms=1, dead_letters=0, stuck=1, modes=("worker",)
    )
    FigureHistory(client).add(Sample(at_ms=server_time_ms(client), handlers={"shop.total": figures}))
    found.run("history")
    client.execute("XADD", "totals", "*", "customer", "ann")
    eventually(lambda: call("key", "outputs", "shop.total", "ann", "--json", url=client.url).out, "an output")
    found.run("key outputs", "shop.total", "ann")
    found.run("why", "shop.total", "mad")
    found.run("find", "mad")
    found.run("find", client.execute("XRANGE", "orders", "-", "+", "COUNT", 1)[0][0].decode())
    found.run("find", "shop.total")
    found.run("doctor", code=1)  # a dead letter has just come
    client.execute("XGROUP", "DESTROY", "orders", "others")


def _repair(found: _Outputs, client: Client) -> None:
    letter, *_ = found.run("dlq list")
    found.run("dlq list --count", "--count")
    found.run("dlq groups")
    found.run("dlq show", letter["letter_id"])
    found.run("dlq edit", letter["letter_id"], "--set", "customer=ann", "--set", "n=1", "--remove", "raw", "--dry-run")
    found.run("dlq redrive", letter["letter_id"], "--yes")
    report_redrive(client, "shop", "total", RedriveReport(id="1-0", by="ann", rate=1, began_ms=1, letters=2))
    found.run("dlq stop", "shop.total")
    found.run("dlq purge", "--all", "--yes")
    found.run("state show", "shop.total", "ann")
    found.run("state list", "shop.total")
    found.run("state export", "shop.total")
    found.run("state reset", "shop.total", "ann", "--yes")
    found.run("rate show", "shop.total")
    found.run("rate set", "shop.total", "60/m")
    found.run("rate show", "shop.total")
    found.run("pause", "shop.total")
    found.run("info")
    found.run("rate clear", "shop.total")
    found.run("key list --count", "--count", "shop.total")
    found.run("resume", "shop.total")
    client.execute("SET", worker_name_key("shop", "w-0"), "token")
    found.run("drain", "w-0", "--dry-run")
    found.run("drain", "w-0", "--yes")
    found.run("key park", "shop.total", "bob")
    found.run("key skip", "shop.total", "mad", "--yes")
    found.run("key unpark", "shop.total", "mad")
    found.run("key unpark", "shop.total", "--all", "--yes")
    found.run("audit")


def _change_groups(found: _Outputs, client: Client) -> None:
    found.run("group list", "orders")
    found.run("group create", "orders", "g", "--after", "earliest")
    client.execute("XREADGROUP", "GROUP", "g", "c1", "STREAMS", "orders", ">")
    found.run("group consumers", "orders", "g")
    first, *_ = found.run("group pending", "orders", "g")
    found.run("group pending --count", "orders", "g", "--count")
    found.run("group claim", "orders", "g", "c2", first["id"], "--create")
    found.run("group claim", "orders", "g", "c2", first["id"], "9-9", "--min-idle", "1h", code=1)
    found.run("group delete-consumer", "orders", "g", "c2", "--transfer-to", "c1", "--yes")
    client.execute("XGROUP", "CREATECONSUMER", "orders", "g", "c3")
    found.run("group clean", "orders", "g", "--idle", "0s", "--yes")
    found.run("group set-id", "orders", "g", "--after", "latest", "--yes")
    found.run("group delete", "orders", "g", "--yes")


def _change_leases(found: _Outputs, client: Client) -> None:
    found.run("lease add", "calls", "call:1", "call:2")
    with Balancer(client.url, "calls", consumer="me", policy=BalancerPolicy(lease_ms=300_000)) as balancer:
        assert all(isinstance(balancer.next(FAIL_SAFE_S), StreamAdded) for _ in range(2))
        found.run("lease list", "calls")
        found.run("lease list --count", "calls", "--count")
        found.run("lease release", "calls", "call:1", "--yes")
        found.run("lease remove", "calls", "call:2", "--yes")
        found.run("lease release", "calls", "call:9", "--yes", code=1)
        found.run("lease remove", "calls", "call:9", "--yes", code=1)


def _change_partitions(found: _Outputs, client: Client) -> None:
    found.run("partition create", "bills", "2")
    found.run("partition grow", "bills", "3", "--yes")
    found.run("partition show", "bills")


def _replay(found: _Outputs, app: Path) -> None:
    """Two versions that agree in one key and not in another, which fails in one of them."""
    old, new = (app.with_name(f"json_reference_{name}.py") for name in ("old", "new"))
    timer = 'After("1d", {"a": "b"}, name="remind")'
    text = APP.replace("import App", "import After, App").replace(
        'return {"n": state["n"]}', f'return {{"n": 1}}, {timer}'
    )
    old.write_text(text)
    new.write_text(text.replace('"mad":', '"none":'))
    for key in ("ann", "mad"):
        for event in found.run("replay", str(old), "total", key, "--new", str(new), "--yes", code=int(key == "mad")):
            found.values[f"replay: {event['event']}"].append(event)


def _services(found: _Outputs, app: Path, folder: Path) -> None:
    found.service("exporter", "--metrics-address", "0")
    found.service("dev", "--data-dir", str(folder / "dev"), "--port", "0")
    found.service("serve", "--insecure-no-token", "--port", "0", "--metrics-address", "0")
    found.service("console", "--port", "0")
    group = ("--ticket-stream", "s", "--concurrency-stream-group", "g")
    found.service("master", *group, "--insecure-no-token", "--port", "0", "--metrics-address", "0")
    nowhere = "http://127.0.0.1:1/api"
    found.service(
        "consumer",
        f"{app}:consume",
        *group,
        "--name",
        "c",
        "--port",
        "0",
        "--master-register-api-url",
        f"{nowhere}/consumers/register",
        "--master-acknowledge-api-url",
        f"{nowhere}/messages/acknowledge",
    )


def here() -> list[str]:
    return [name for name in sections() if name.partition(":")[0] not in ELSEWHERE or name == "tail"]


def test_the_page_has_a_section_for_every_command_with_json_and_no_other() -> None:
    commands = {
        " ".join(words) for words, one in all_commands() if any("--json" in option.opts for option in one.params)
    }
    counts = {
        " ".join(words) for words, one in all_commands() if any("--count" in option.opts for option in one.params)
    }
    assert {name.partition(":")[0].removesuffix(" --count") for name in sections()} == commands | ALWAYS_JSON
    assert {name.removesuffix(" --count") for name in sections() if name.endswith(" --count")} == counts


@pytest.mark.parametrize("name", here())
def test_a_command_prints_what_the_page_says(name: str, outputs: Mapping[str, list[Any]]) -> None:
    assert outputs.get(name), f"no test runs {name}"
    assert [fault for value in outputs[name] for fault in faults(sections()[name], value)] == []
    shown = set().union(*(seen(sections()[name], value) for value in outputs[name]))
    assert sections()[name].paths.keys() - shown == NOT_SHOWN.get(name, set())
