"""The dashboards: they are what the script makes of the catalogue, and show all of it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream.observability import metrics as m
from millstream.observability.metrics import CATALOGUE
from scripts.grafana_dashboards import FOLDER, files, grouped
from tests.support.expressions import labels_by_series, promtool_accepts, series_of, wrong_names

pytestmark = [pytest.mark.cli]

BUILT_IN: Mapping[str, str] = {"__rate_interval": "5m", "__range": "1h"}
"""Variables that Grafana itself sets, with a value of each."""


def read() -> dict[str, dict[str, Any]]:
    """The files of the clone, by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def drawn(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The panels that have queries."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """Each query, with the place where it stands and its legend."""
    for name, dashboard in read().items():
        for panel in drawn(dashboard):
            for target in panel["targets"]:
                yield f"{name}, {panel['title']}", target["expr"], target["legendFormat"]


def test_the_dashboards_are_those_of_the_catalogue() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == files(), "run: python scripts/grafana_dashboards.py"
    assert len(written) == 3


def test_every_query_reads_metrics_and_labels_of_the_catalogue() -> None:
    assert len(list(queries())) > 80
    assert [f"{where}: {wrong}" for where, query, _ in queries() for wrong in wrong_names(query)] == []


def test_every_metric_of_the_catalogue_has_a_panel() -> None:
    shown = {name for _, query, _ in queries() for name in series_of(query)}
    absent = [one.name for one in CATALOGUE if not {one.name, f"{one.name}_bucket"} & shown]
    assert absent == [], "give them a panel in scripts/grafana_dashboards.py"


def test_a_legend_names_only_labels_that_its_query_leaves() -> None:
    for where, query, legend in queries():
        left = {name for part in re.findall(r"by \(([\w, ]+)\)", query) for name in part.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", legend)) <= left - {"le"}, where


def test_every_variable_of_a_query_is_on_its_dashboard_and_lists_a_label_of_the_catalogue() -> None:
    known = labels_by_series()
    for name, dashboard in read().items():
        variables = {one["name"]: one for one in dashboard["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) - BUILT_IN.keys()
        assert used == variables.keys(), name
        assert variables.pop("datasource")["query"] == "prometheus"
        for label, variable in variables.items():
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found, variable
            assert found[2] == label
            assert label in known[found[1]], variable


def test_every_panel_has_a_place_of_its_own_and_the_chosen_source() -> None:
    for name, dashboard in read().items():
        cells: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert place["x"] + place["w"] <= 24, (name, panel["title"])
            assert not own & cells, (name, panel["title"])
            cells |= own
        sources = [one["datasource"] for panel in drawn(dashboard) for one in (panel, *panel["targets"])]
        assert {one["uid"] for one in sources} == {"${datasource}"}
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers)


def test_dashboards_have_names_of_their_own() -> None:
    found = list(read().values())
    assert len({one["uid"] for one in found}) == len({one["title"] for one in found}) == len(found)


def test_a_label_that_a_metric_lacks_is_refused_when_a_query_is_made() -> None:
    with pytest.raises(ValueError, match="millstream_lag_messages has no label query"):
        grouped("sum", m.LAG, ["query"], m.LAG.name)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("sum(millstream_lag_message)", "no metric millstream_lag_message"),
        ("rate(millstream_handler_seconds[5m])", "no metric millstream_handler_seconds"),
        ("sum by (key) (millstream_lag_messages)", "no label key"),
        ('millstream_lag_messages{stream!="a"}', "no label stream"),
        ("up", "reads no metric"),
    ],
)
def test_a_name_that_the_catalogue_lacks_is_found(query: str, complaint: str) -> None:
    assert list(wrong_names(query)) == [complaint]


def test_promtool_accepts_every_query(tmp_path: Path) -> None:
    rules = []
    for number, (_, query, _) in enumerate(queries()):
        expression = re.sub(r"\$(\w+)", lambda found: BUILT_IN.get(found[1], ".*"), query)
        rules.append({"record": f"query:{number}", "expr": expression})
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))  # JSON is YAML
    promtool_accepts("rules", file)
