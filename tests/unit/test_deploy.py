"""The container and the services beside it: what `deploy/` starts exists, is reached, and may do no more than it has to."""

import json
import re
from typing import Any

import pytest

from tests.support.deploy_files import DEPLOY, metrics_port, parsed_options, read_yaml
from tests.support.expressions import promtool_accepts

pytestmark = [pytest.mark.cli]

OURS = ("worker", "exporter")


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(DEPLOY / "compose.yaml")
    return found


@pytest.fixture
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """The files and folders of the clone that a service sees, by their place in the container."""
    found = (one.split(":") for one in service.get("volumes", []) if one.startswith("."))
    return {place: source for source, place, mode in found if mode == "ro"}


def test_every_command_of_the_services_is_one_that_millstream_understands(services: dict[str, Any]) -> None:
    commands = {name: one["command"] for name, one in services.items() if one["image"].startswith("millstream")}
    assert [command[0] for command in commands.values()] == list(commands) == list(OURS)
    for command in commands.values():
        parsed_options(command)  # raises UsageError


def test_redis_persists_each_write_and_evicts_nothing(services: dict[str, Any]) -> None:
    output = " ".join(services["redis"]["command"])
    assert "--appendonly yes" in output
    assert "--aof-load-truncated no" in output
    assert "--maxmemory-policy noeviction" in output
    assert services["redis"]["volumes"] == ["redis:/data"]


def test_the_grace_period_of_the_service_exceeds_that_of_the_worker(services: dict[str, Any]) -> None:
    stop_timeout = parsed_options(services["worker"]["command"])["stop_timeout"]
    assert stop_timeout == 25
    assert services["worker"]["stop_grace_period"] == "40s"


def test_no_service_can_write_its_root_or_gain_rights(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "redis":  # its image begins as root, and gives that up
            assert service["cap_drop"] == ["ALL"], name


def test_only_this_machine_reaches_the_ports(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert [port for port in ports if not re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)] == []
    assert "ports" not in services["redis"]


def test_every_image_has_a_tag_that_stays(services: dict[str, Any]) -> None:
    images = [one["image"] for name, one in services.items() if name not in OURS]
    assert [image for image in images if not re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+(-\w+)?", image)] == []


def test_everything_that_is_mounted_exists_and_cannot_be_changed(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        named = [one for one in service.get("volumes", []) if not one.startswith(".")]
        assert {one.split(":")[0] for one in named} <= compose["volumes"].keys(), name
        assert len(mounts(service)) + len(named) == len(service.get("volumes", [])), f"{name}: one can be written"
        assert [source for source in mounts(service).values() if not (DEPLOY / source).exists()] == [], name


def test_prometheus_scrapes_each_service_that_has_metrics_and_evaluates_the_alerts(services: dict[str, Any]) -> None:
    found = read_yaml(DEPLOY / "prometheus/prometheus.yaml")
    targets = {target for job in found["scrape_configs"] for one in job["static_configs"] for target in one["targets"]}
    assert targets == {f"{name}:{metrics_port(services[name]['command'])}" for name in OURS}
    seen = mounts(services["prometheus"])
    assert [seen[f"/etc/prometheus/{name}"] for name in found["rule_files"]] == ["./prometheus/rules.yaml"]
    assert seen["/etc/prometheus/prometheus.yml"] == "./prometheus/prometheus.yaml"


def test_grafana_asks_prometheus_and_shows_the_dashboards(services: dict[str, Any]) -> None:
    (source,) = read_yaml(DEPLOY / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(one.endswith(f":{port}") for one in services[host]["ports"])
    (provider,) = read_yaml(DEPLOY / "grafana/provisioning/dashboards/millstream.yaml")["providers"]
    seen = mounts(services["grafana"])
    assert seen[provider["options"]["path"]] == "./grafana/dashboards"
    assert seen["/etc/grafana/provisioning"] == "./grafana/provisioning"
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana/dashboards" / home.removeprefix(f"{provider['options']['path']}/")).exists()


def test_visitors_of_grafana_may_only_look(services: dict[str, Any]) -> None:
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_promtool_accepts_the_configuration() -> None:
    promtool_accepts("config", DEPLOY / "prometheus/prometheus.yaml")


def test_the_image_does_not_run_as_root_and_gets_its_signals_without_a_shell() -> None:
    instructions = re.findall(r"^([A-Z]+) (.+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    last = dict(instructions)
    assert int(last["USER"].partition(":")[0]) > 0
    assert json.loads(last["ENTRYPOINT"]) == ["millstream"]
    assert json.loads(last["CMD"]) == ["--help"]
