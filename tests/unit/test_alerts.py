"""The alerts: `deploy/prometheus/rules.yaml` is what the script makes of the catalogue, and a page has the same alerts."""

import re
import subprocess
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from millstream.observability import metrics as m
from scripts.alert_rules import FILE as RULES
from scripts.alert_rules import RUNBOOK, series, text
from scripts.alert_rules import rules as written
from tests.support.expressions import labels_by_series, promtool_accepts, series_of, wrong_names
from tests.support.pages import consoles_of
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rules() -> list[dict[str, Any]]:
    return read_rules()


@cache
def read_rules() -> list[dict[str, Any]]:
    """The rules of the file."""
    skip_without(find_spec("yaml"), "PyYAML is not installed: make setup")
    groups = import_module("yaml").safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def urls_of(rules: Path) -> list[str]:
    """The addresses of the runbook in a file of rules."""
    return re.findall(r"runbook_url: (\S+)", rules.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_alerts_are_those_of_the_catalogue(rules: list[dict[str, Any]]) -> None:
    assert RULES.read_text() == text(), "run: python -m scripts.alert_rules"
    found = [(one["alert"], one["expr"], one["for"], one["annotations"]["summary"]) for one in rules]
    assert found == [(one.alert, one.expression, f"{one.minutes}m", one.summary) for one in written()], (
        "as YAML reads it"
    )


def test_a_label_that_a_metric_lacks_is_refused_when_an_expression_is_made() -> None:
    with pytest.raises(ValueError, match="millstream_keys has no label status"):
        series(m.KEYS, status='="parked"')


def test_every_rule_has_a_time_a_severity_a_summary_and_a_section_of_the_runbook(rules: list[dict[str, Any]]) -> None:
    assert len(rules) >= 10
    known = anchors(ROOT / "docs/operations/runbook.md")
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        place, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (place, anchor in known) == (RUNBOOK, True), f"{rule['alert']}: {anchor}"
    assert len({rule["alert"] for rule in rules}) == len(rules)


def test_the_command_of_the_page_sets_the_address_of_the_runbook_in_every_rule(tmp_path: Path) -> None:
    (command,) = [
        line
        for block in consoles_of("docs/operations/production.md")
        for line in block.commands.splitlines()
        if "https://docs.example" in line
    ]
    copy = tmp_path / "deploy/prometheus/rules.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(RULES.read_text())
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert urls_of(copy) == [one.replace("docs.example", "docs.internal/millstream") for one in urls_of(RULES)]
    assert not any("docs.example" in one for one in urls_of(copy))


def test_every_metric_and_label_of_a_rule_is_in_the_catalogue(rules: list[dict[str, Any]]) -> None:
    assert [f"{rule['alert']}: {wrong}" for rule in rules for wrong in wrong_names(rule["expr"])] == []


def test_the_summary_of_a_rule_uses_labels_that_its_expression_leaves(rules: list[dict[str, Any]]) -> None:
    labels = labels_by_series()
    for rule in rules:
        outer = re.match(r"(?:sum|max) by \(([\w, ]+)\)", rule["expr"])
        left = (
            set(outer[1].split(", ")) if outer else set.intersection(*(labels[one] for one in series_of(rule["expr"])))
        )
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= left, rule["alert"]


def test_the_page_on_production_has_the_alerts_of_the_file(rules: list[dict[str, Any]]) -> None:
    page = (ROOT / "docs/operations/production.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| `(.+)` \| (\w+) \| (\w+) \| \[runbook\]\(runbook\.md#([\w-]+)\) \|$", page, re.M
    )
    shown = [(name, expression.replace("\\|", "|"), *others) for name, expression, *others in rows]
    assert shown == [
        (
            rule["alert"],
            rule["expr"],
            rule["for"],
            rule["labels"]["severity"],
            rule["annotations"]["runbook_url"].partition("#")[2],
        )
        for rule in rules
    ]


def test_promtool_accepts_the_rules() -> None:
    promtool_accepts("rules", RULES)
