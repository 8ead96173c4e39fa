"""The files for Kubernetes: their commands exist, their parts fit together, and the pages show the same."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy_files import DEPLOY, documents, parsed_options, read_yaml, served_port
from tests.support.pages import blocks_of, consoles_of
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

FOLDER = DEPLOY / "kubernetes"
PAGE = "docs/operations/kubernetes.md"
SHOWN = {
    **dict.fromkeys(("console.yaml", "exporter.yaml", "podmonitor.yaml", "worker.yaml"), PAGE),
    "scaledobject.yaml": "docs/scaling.md",
}
"""The page that shows each file as a whole."""


def objects(kind: str = "") -> list[dict[str, Any]]:
    """The objects of all files, or those of a kind."""
    found = [one for path in sorted(FOLDER.glob("*.yaml")) for one in documents(path.read_text())]
    return [one for one in found if kind in ("", one["kind"])]


def pods() -> Iterator[tuple[str, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """The name, the labels and the specification of each Deployment's pod, and its one container."""
    for one in objects("Deployment"):
        template = one["spec"]["template"]
        (container,) = template["spec"]["containers"]
        yield one["metadata"]["name"], template["metadata"]["labels"], template["spec"], container


def pods_selected(labels: dict[str, str]) -> list[str]:
    return [name for name, has, _, _ in pods() if labels.items() <= has.items()]


def test_every_command_of_a_container_is_one_that_millstream_understands() -> None:
    commands = {name: container["args"] for name, _, _, container in pods()}
    assert {name: words[0] for name, words in commands.items()} == {
        "console": "console",
        "exporter": "exporter",
        "shop-worker": "worker",
    }
    for words in commands.values():
        parsed_options(words)  # raises UsageError


def test_probes_and_the_named_port_reach_the_port_of_the_command() -> None:
    for name, _, _, container in pods():
        port, ready = ("http", "/healthz") if name == "console" else ("metrics", "/readyz")
        assert container["ports"] == [{"name": port, "containerPort": served_port(container["args"])}], name
        for probe, path in (("readinessProbe", ready), ("livenessProbe", "/healthz")):
            assert container[probe]["httpGet"] == {"path": path, "port": port}, name
        liveness = container["livenessProbe"]
        patience_s = liveness["periodSeconds"] * liveness["failureThreshold"]
        assert patience_s >= (60 if name == "console" else 300), f"{name}: restarts while Redis is away"


def test_the_console_finds_its_tokens_in_a_secret_and_may_not_change_them() -> None:
    ((pod, container),) = [(pod, one) for name, _, pod, one in pods() if name == "console"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    (item,) = volume["secret"]["items"]
    assert str(parsed_options(container["args"])["token_file"]) == f"{mount['mountPath']}/{item['path']}"
    assert (mount["name"], mount["readOnly"]) == (volume["name"], True)
    assert "subPath" not in mount, "a changed secret would not reach the pod"
    shown = "\n".join(console.commands for console in consoles_of(PAGE))
    assert f"kubectl create secret generic {volume['secret']['secretName']} --from-file={item['key']}\n" in shown


def test_a_worker_may_stop_in_order_before_it_is_killed() -> None:
    for name, _, pod, container in pods():
        if container["args"][0] == "worker":
            stop_timeout = parsed_options(container["args"])["stop_timeout"]
            assert pod["terminationGracePeriodSeconds"] == stop_timeout + 15, name


def test_no_container_runs_as_root_writes_its_root_or_gains_rights() -> None:
    for name, _, pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["automountServiceAccountToken"] is False, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_a_worker_has_a_folder_for_temporary_files() -> None:
    (pod, container) = next((pod, one) for _, _, pod, one in pods() if one["args"][0] == "worker")
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == "/tmp"
    assert [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume] == [mount["name"]]


def test_every_container_requests_what_it_needs_and_has_a_limit_of_memory_only() -> None:
    for name, _, _, container in pods():
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert container["resources"]["limits"].keys() == {"memory"}, f"{name}: throttled, it would look frozen"


def test_the_url_of_redis_comes_from_a_secret() -> None:
    for name, _, _, container in pods():
        url = next(one for one in container["env"] if one["name"] == "MILLSTREAM_URL")
        assert url["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "url"}}, name
        assert "--url" not in " ".join(container["args"]), name


def test_every_selector_selects_a_pod() -> None:
    for one in objects("Deployment") + objects("PodDisruptionBudget"):
        name = one["metadata"]["name"]
        assert pods_selected(one["spec"]["selector"]["matchLabels"]) == [name]
    services = {one["metadata"]["name"]: one["spec"] for one in objects("Service")}
    assert {name: pods_selected(one["selector"]) for name, one in services.items()} == {
        "console": ["console"],
        "exporter": ["exporter"],
    }
    assert services["console"]["type"] == "ClusterIP"
    (monitor,) = objects("PodMonitor")
    (expression,) = monitor["spec"]["selector"]["matchExpressions"]
    assert [pods_selected({expression["key"]: value}) for value in expression["values"]] == [
        ["shop-worker"],
        ["exporter"],
    ]
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_the_autoscaler_asks_the_exporter_and_scales_the_worker() -> None:
    (service,) = [one for one in objects("Service") if one["metadata"]["name"] == "exporter"]
    (scaled,) = objects("ScaledObject")
    place = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/scale?"
    assert [one for one in scaled["spec"]["triggers"] if not one["metadata"]["url"].startswith(place)] == []
    assert scaled["spec"]["scaleTargetRef"]["name"] in [one["metadata"]["name"] for one in objects("Deployment")]


def test_the_list_of_files_names_all_that_need_neither_an_operator_nor_tokens() -> None:
    listed = read_yaml(FOLDER / "kustomization.yaml")["resources"]
    assert {*listed, "console.yaml", "podmonitor.yaml", "scaledobject.yaml", "kustomization.yaml"} == {
        path.name for path in FOLDER.iterdir()
    }
    kinds = {one["kind"] for name in listed for one in documents((FOLDER / name).read_text())}
    assert kinds == {"Deployment", "PodDisruptionBudget", "Service"}


def test_the_pages_show_the_files_as_they_are() -> None:
    for name, page in SHOWN.items():
        shown = [block.text for block in blocks_of(page) if block.language == "yaml"]
        assert (FOLDER / name).read_text() in shown, f"{page} does not show deploy/kubernetes/{name}"


def test_the_command_of_the_page_makes_an_object_of_the_alerts(tmp_path: Path) -> None:
    (command,) = [
        line for block in consoles_of(PAGE) for line in block.commands.splitlines() if "PrometheusRule" in line
    ]
    done = subprocess.run(
        ["bash", "-c", command.replace("rule.yaml", str(tmp_path / "rule.yaml"), 1)], cwd=DEPLOY.parent, check=False
    )
    assert done.returncode == 0
    made = read_yaml(tmp_path / "rule.yaml")
    assert (made["kind"], made["spec"]) == ("PrometheusRule", read_yaml(DEPLOY / "prometheus/rules.yaml"))


def test_kubectl_puts_the_files_together() -> None:
    skip_without(shutil.which("kubectl"), "kubectl is not installed; it comes with Kubernetes")
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(documents(done.stdout)) == 4
