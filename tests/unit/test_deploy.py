"""The container and the services beside it: what `deploy/` starts exists, is reached, and may do no more than it has to."""

import json
import re
from typing import Any

import pytest

from tests.support.deploy_files import DEPLOY, metrics_port, parsed_options, read_yaml, served_port
from tests.support.expressions import promtool_accepts

pytestmark = [pytest.mark.cli]

OURS = ("worker", "exporter", "console")
MEASURED = ("worker", "exporter")
IMAGES = ("Dockerfile", "Dockerfile.spark")
INIT = ["tini", "-s", "--"]


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


def test_the_console_has_its_tokens_from_a_secret_that_is_in_no_commit(
    compose: dict[str, Any], services: dict[str, Any]
) -> None:
    console = services["console"]
    (secret,) = console["secrets"]
    assert str(parsed_options(console["command"])["token_file"]) == f"/run/secrets/{secret}"
    (source,) = compose["secrets"][secret].values()
    assert re.fullmatch(r"\./(.+)/[\w-]+", source)
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert f"deploy/{source.split('/')[1]}/" in ignored
    assert console["build"]["args"]["EXTRAS"] == "console"
    assert console["ports"] == [f"127.0.0.1:{served_port(console['command'])}:{served_port(console['command'])}"]


def test_the_page_makes_each_token_file_readable_by_its_owner_alone() -> None:
    pages = sorted((DEPLOY.parent / "docs").rglob("*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines() if re.search(r"rand.*>.*token", line)]
    assert len(lines) >= 3
    assert [line for line in lines if not line.startswith("$ (umask 077; ")] == []


def test_the_page_names_all_services_that_start_without_the_console(services: dict[str, Any]) -> None:
    page = (DEPLOY.parent / "docs/operations/compose.md").read_text()
    (named,) = re.findall(r"To leave the console out.*? up --build --detach ([a-z ]+)`", page)
    needed = {one for name in named.split() for one in services[name].get("depends_on", ())}
    assert {*named.split(), *needed} == services.keys() - {"console"}


def test_healthchecks_ask_the_port_of_the_command(services: dict[str, Any]) -> None:
    for name in ("worker", "console"):
        program = services[name]["healthcheck"]["test"][-1]
        assert f"http://127.0.0.1:{served_port(services[name]['command'])}/healthz" in program, name
        compile(program, name, "exec")


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
    assert len(ports) == 4
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
    assert targets == {f"{name}:{metrics_port(services[name]['command'])}" for name in MEASURED}
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


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile: their names and their words."""
    return re.findall(r"^([A-Z]+) (.+)$", (DEPLOY / name).read_text(), re.MULTILINE)


def test_the_image_does_not_run_as_root_and_gets_its_signals_without_a_shell() -> None:
    last = dict(instructions("Dockerfile"))
    assert int(last["USER"].partition(":")[0]) > 0
    assert json.loads(last["ENTRYPOINT"]) == [*INIT, "millstream"]
    assert json.loads(last["CMD"]) == ["--help"]


@pytest.mark.parametrize("name", IMAGES)
def test_the_first_process_of_an_image_reaps_orphans_and_is_installed(name: str) -> None:
    found = instructions(name)
    assert json.loads(dict(found)["ENTRYPOINT"])[: len(INIT)] == INIT
    (install,) = [words for instruction, words in found if instruction == "RUN" and "apt-get install" in words]
    assert INIT[0] in install.split()


def test_the_image_of_spark_has_the_tested_spark_once_and_the_entry_point_of_its_pods() -> None:
    found = instructions("Dockerfile.spark")
    (version,) = re.findall(r"^pyspark==(\S+)", (DEPLOY.parent / "requirements.lock").read_text(), re.MULTILINE)
    assert found[0] == ("ARG", f"SPARK={version}")
    (install,) = [words for name, words in found if name == "RUN" and words.startswith("pip install")]
    assert "[spark" in install
    assert '"pyspark==$SPARK"' in install
    copied = {words.split()[-2]: words.split()[0] for name, words in found if name == "COPY" and "--from" in words}
    assert copied == {"/opt/java/openjdk": "--from=spark", "/opt/decom.sh": "--from=spark", "/wheels": "--from=wheel"}
    last = dict(found)
    assert int(last["USER"].partition(":")[0]) > 0
    assert json.loads(last["ENTRYPOINT"]) == [*INIT, "/opt/entrypoint.sh"]
    assert last["ENV"].endswith(
        f"/python{last['FROM'].removeprefix('python:').removesuffix('-slim')}/site-packages/pyspark"
    )


def test_both_images_are_built_from_the_same_wheel() -> None:
    stages = [(DEPLOY / name).read_text().split("AS wheel\n")[1].split("\n\n")[0] for name in IMAGES]
    assert stages[0] == stages[1]
    ignored = [(DEPLOY / f"{name}.dockerignore").read_text() for name in IMAGES]
    assert ignored[0] == ignored[1]
