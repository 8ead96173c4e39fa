"""The chart: it makes the objects of `deploy/kubernetes`, uses each of its values, and starts commands that exist."""

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.chart_templates import ChartError, render
from tests.support.deploy_files import DEPLOY, documents, parsed_options, read_yaml, served_port
from tests.support.pages import blocks_of
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

CHART = DEPLOY / "helm/millstream"
PAGE = "docs/operations/helm.md"
OWN = "app.kubernetes.io/"
"""Labels that only the chart sets begin with it."""

LEAST: dict[str, Any] = {"image": {"repository": "registry.example/shop", "tag": "7"}, "app": "app.py:app"}
SCALED = LEAST | {"autoscaling": {"enabled": True, "handler": "shop.total"}}
FULL = SCALED | {
    "imagePullSecrets": [{"name": "registry"}],
    "stopTimeoutSeconds": 60,
    "extraArgs": ["--trim", "--only=total"],
    "extraEnv": [{"name": "MILLSTREAM_LOG_FORMAT", "value": "json"}],
    "podAnnotations": {"team": "shop"},
    "metrics": {"port": 9700, "podMonitor": True, "podMonitorLabels": {"release": "prometheus"}},
    "exporter": {"enabled": False, "service": "figures"},
    "console": {
        "enabled": True,
        "replicas": 2,
        "port": 8081,
        "tokens": {"secret": "tokens", "key": "file"},
        "extraArgs": ["--redact=card"],
        "extraEnv": [{"name": "MILLSTREAM_CONSOLE_CONNECTIONS", "value": "50"}],
    },
    "podDisruptionBudget": {"maxUnavailable": "25%"},
}
CASES: Mapping[str, dict[str, Any]] = {
    "least": LEAST,
    "monitored": LEAST | {"metrics": {"podMonitor": True}, "replicas": 5},
    "with a console": LEAST | {"console": {"enabled": True}},
    "scaled": SCALED,
    "scaled by messages": LEAST | {"autoscaling": {"enabled": True, "handler": "shop.notify", "keyed": False}},
    "full": FULL,
}


def plain(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Objects of the chart without what only the chart sets, and with the names of the plain files."""
    text = re.sub(r"shop-(console|exporter)", r"\1", json.dumps(found))
    objects: list[dict[str, Any]] = json.loads(text)
    for one in objects:
        metadata = one["metadata"]
        labels = {name: value for name, value in metadata.pop("labels", {}).items() if not name.startswith(OWN)}
        metadata.update({"labels": labels} if labels else {})
        for container in one["spec"].get("template", {}).get("spec", {}).get("containers", []):
            assert container.pop("imagePullPolicy") == "IfNotPresent"
    return objects


def of_files(*names: str) -> list[dict[str, Any]]:
    """The objects of plain files."""
    return [one for name in names for one in documents((DEPLOY / "kubernetes" / name).read_text())]


def the(kind: str, found: list[dict[str, Any]], role: str = "") -> dict[str, Any]:
    (one,) = [one for one in found if one["kind"] == kind and one["metadata"]["name"].endswith(role)]
    return one


def leaves(values: Any, path: str = "") -> Iterator[str]:
    """The names of all values, as templates name them. A value that is handed on as a whole counts for its parts."""
    if isinstance(values, dict) and values and not path.endswith("resources"):
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}")
    else:
        yield path


def used() -> set[str]:
    texts = [path.read_text() for path in (CHART / "templates").iterdir()]
    return {name for text in texts for name in re.findall(r"\.Values((?:\.\w+)+)", text)}


def test_the_chart_makes_the_objects_of_the_plain_files() -> None:
    found = plain(render(CHART, LEAST | {"metrics": {"podMonitor": True}, "console": {"enabled": True}}, "shop"))
    expected = of_files("console.yaml", "exporter.yaml", "podmonitor.yaml", "worker.yaml")
    assert [one["kind"] for one in found] == [one["kind"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == other


def test_the_chart_scales_as_the_page_on_scaling_does() -> None:
    page = {one["metadata"]["name"]: one["spec"] for text in yaml_of("docs/scaling.md") for one in documents(text)}
    keyed = plain(render(CHART, SCALED, "shop"))
    assert the("ScaledObject", keyed)["spec"] == page["shop-total"]
    assert "replicas" not in the("Deployment", keyed, "worker")["spec"], "KEDA sets them"
    settings = {"enabled": True, "handler": "shop.notify", "keyed": False, "minReplicas": 0, "target": 1000}
    by_messages = plain(render(CHART, LEAST | {"autoscaling": settings}, "shop"))
    expected = page["shop-notify"] | {"scaleTargetRef": {"name": "shop-worker"}}
    assert the("ScaledObject", by_messages)["spec"] == expected


def yaml_of(page: str) -> list[str]:
    return [block.text for block in blocks_of(page) if block.language == "yaml"]


def test_every_value_that_a_template_uses_exists_and_every_value_is_used() -> None:
    assert sorted(leaves(read_yaml(CHART / "values.yaml"))) == sorted(f"{name}" for name in used())


def test_the_schema_has_the_values_and_refuses_others() -> None:
    def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        assert schema["additionalProperties"] is False, path
        assert schema["properties"].keys() == values.keys(), path
        for name, value in values.items():
            if "properties" in schema["properties"][name]:
                compare(schema["properties"][name], value, f"{path}.{name}")

    compare(json.loads((CHART / "values.schema.json").read_text()), read_yaml(CHART / "values.yaml"), "")


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_every_command_of_the_chart_is_one_that_millstream_understands(values: dict[str, Any]) -> None:
    deployments = [one for one in render(CHART, values, "shop") if one["kind"] == "Deployment"]
    assert deployments
    for one in deployments:
        (container,) = one["spec"]["template"]["spec"]["containers"]
        assert served_port(container["args"]) == container["ports"][0]["containerPort"]


def test_the_values_reach_the_pods() -> None:
    found = render(CHART, FULL, "shop")
    template = the("Deployment", found, "worker")["spec"]["template"]
    pod, (container,) = template["spec"], template["spec"]["containers"]
    options = parsed_options(container["args"])
    assert (options["trim"], list(options["only"]), options["stop_timeout"]) == (True, ["total"], 60)
    assert pod["terminationGracePeriodSeconds"] == 75
    assert container["env"][1:] == FULL["extraEnv"]
    assert pod["imagePullSecrets"] == FULL["imagePullSecrets"]
    assert template["metadata"]["annotations"] == FULL["podAnnotations"]
    console = the("Deployment", found, "console")["spec"]
    (shown,) = console["template"]["spec"]["containers"]
    assert (console["replicas"], shown["ports"][0]["containerPort"], shown["args"][-1]) == (2, 8081, "--redact=card")
    assert shown["env"] == [container["env"][0], *FULL["extraEnv"], *FULL["console"]["extraEnv"]]
    (volume,) = console["template"]["spec"]["volumes"]
    assert volume["secret"] == {"secretName": "tokens", "items": [{"key": "file", "path": "tokens"}]}
    assert the("Service", found)["spec"]["ports"] == [{"name": "http", "port": 8081, "targetPort": "http"}]
    assert the("PodMonitor", found)["metadata"]["labels"]["release"] == "prometheus"
    assert the("PodDisruptionBudget", found)["spec"]["maxUnavailable"] == "25%"


def test_a_release_has_no_console_unless_its_values_enable_it() -> None:
    assert {one["metadata"]["name"] for one in render(CHART, LEAST, "shop")} == {"shop-worker", "shop-exporter"}


def test_a_release_without_an_exporter_asks_that_of_another() -> None:
    found = render(CHART, FULL, "shop")
    assert "shop-exporter" not in {one["metadata"]["name"] for one in found}
    urls = {one["metadata"]["url"] for one in the("ScaledObject", found)["spec"]["triggers"]}
    assert urls == {"http://figures:9464/scale?handler=shop.total"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "image.repository: "),
        ({"image": {"repository": "shop"}}, "image.tag: "),
        ({"image": LEAST["image"]}, "app: "),
        (LEAST | {"autoscaling": {"enabled": True}}, "autoscaling.handler: "),
        (SCALED | {"exporter": {"enabled": False}}, "exporter.service: "),
    ],
)
def test_a_value_that_is_required_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ChartError, match=f"^{message}"):
        render(CHART, values, "shop")


def test_the_page_has_values_that_the_chart_accepts() -> None:
    (values,) = [one for text in yaml_of(PAGE) for one in documents(text)]
    assert the("ScaledObject", render(CHART, values, "shop"))["spec"]["scaleTargetRef"]["name"] == "shop-worker"
    assert {path for path in leaves(values) if path not in set(leaves(read_yaml(CHART / "values.yaml")))} == set()


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_helm_makes_the_same_objects(values: dict[str, Any]) -> None:
    skip_without(find_spec("helm_python"), "Helm is not installed: pip install helm-python-sdk")
    helm = import_module("helm_python")
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values=values, name="shop")
    assert [one for name in sorted(texts) for one in documents(texts[name])] == render(CHART, values, "shop")
    assert helm.lint(CHART, values)["errors"] == []


def test_helm_refuses_a_value_that_the_chart_lacks() -> None:
    skip_without(find_spec("helm_python"), "Helm is not installed: pip install helm-python-sdk")
    found = import_module("helm_python").lint(CHART, LEAST | {"replica": 3})
    assert any("replica" in message["error"] for message in found["messages"])
