"""The container: what `deploy/` starts exists, nothing runs as root, and signals reach millstream."""

import json
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.main import load_command
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def services() -> dict[str, Any]:
    skip_without(find_spec("yaml"), "PyYAML is not installed: make setup")
    yaml = import_module("yaml")
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_every_command_of_the_services_is_one_that_millstream_understands(services: dict[str, Any]) -> None:
    commands = [service["command"] for service in services.values() if service["image"] == "millstream"]
    assert [command[0] for command in commands] == ["worker", "exporter"]
    for name, *options in commands:
        load_command(name).make_context(name, options).close()  # raises UsageError


def test_redis_persists_each_write_and_evicts_nothing(services: dict[str, Any]) -> None:
    output = " ".join(services["redis"]["command"])
    assert "--appendonly yes" in output
    assert "--maxmemory-policy noeviction" in output
    assert services["redis"]["volumes"] == ["redis:/data"]


def test_the_grace_period_of_the_service_exceeds_that_of_the_worker(services: dict[str, Any]) -> None:
    worker = load_command("worker")
    stop_timeout = next(one for one in worker.params if one.name == "stop_timeout")
    assert stop_timeout.default == 25
    assert services["worker"]["stop_grace_period"] == "40s"


def test_no_service_of_ours_can_write_or_gain_rights(services: dict[str, Any]) -> None:
    for name in ("worker", "exporter"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]


def test_the_image_does_not_run_as_root_and_gets_its_signals_without_a_shell() -> None:
    instructions = re.findall(r"^([A-Z]+) (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    last = dict(instructions)
    assert int(last["USER"].partition(":")[0]) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["millstream"]
    assert json.loads(last["CMD"]) == ["--help"]
