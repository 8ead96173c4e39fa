"""Which engine `millstream auto` chooses, by the lag and by how long the engine has run."""

import pytest

from millstream.admin.waiting_messages import Waiting
from millstream.cli.engine_policy import Engine, EnginePolicy
from millstream.errors import ConfigError

pytestmark = [pytest.mark.cli]

POLICY = EnginePolicy(spark_above=1_000, workers_below=100, minimum_ms=60_000)
LONG_MS, SHORT_MS = 60_000.0, 59_999.0


@pytest.mark.parametrize(
    ("lag", "engine", "since_ms", "wanted"),
    [
        (1_001, "workers", LONG_MS, "spark"),
        (1_000, "workers", LONG_MS, "workers"),
        (99, "spark", LONG_MS, "workers"),
        (100, "spark", LONG_MS, "spark"),
        (500, "workers", LONG_MS, "workers"),
        (500, "spark", LONG_MS, "spark"),
        (0, "workers", LONG_MS, "workers"),
        (9_999_999, "spark", LONG_MS, "spark"),
        (9_999_999, "workers", SHORT_MS, "workers"),
        (0, "spark", SHORT_MS, "spark"),
        (None, "spark", LONG_MS, "spark"),
        (None, "workers", LONG_MS, "workers"),
    ],
)
def test_an_engine_is_changed_beyond_its_limit_once_it_has_run_for_the_minimum(
    lag: int | None, engine: Engine, since_ms: float, wanted: Engine
) -> None:
    assert POLICY.decide(None if lag is None else Waiting(lag), engine, since_ms) == wanted


@pytest.mark.parametrize(("lag", "wanted"), [(0, "workers"), (1_000, "workers"), (1_001, "spark")])
def test_an_app_starts_on_spark_only_above_the_limit_of_spark(lag: int, wanted: Engine) -> None:
    assert POLICY.first(Waiting(lag)) == wanted


def test_a_lag_between_the_limits_never_changes_the_engine() -> None:
    for lag in range(POLICY.workers_below, POLICY.spark_above + 1):
        assert POLICY.decide(Waiting(lag), "workers", LONG_MS) == "workers"
        assert POLICY.decide(Waiting(lag), "spark", LONG_MS) == "spark"


def test_a_lower_bound_of_the_lag_brings_spark_and_never_the_workers() -> None:
    assert POLICY.decide(Waiting(1_001, is_partial=True), "workers", LONG_MS) == "spark"
    assert POLICY.decide(Waiting(99, is_partial=True), "spark", LONG_MS) == "spark"
    assert POLICY.explain(Waiting(1_001, is_partial=True), "spark").startswith("lag is at least 1,001 messages, above")


@pytest.mark.parametrize("below", [1_000, 1_001])
def test_limits_without_a_distance_are_refused(below: int) -> None:
    with pytest.raises(ConfigError, match="--spark-above 1000 must be greater than --workers-below"):
        EnginePolicy(spark_above=1_000, workers_below=below)


def test_the_line_of_a_change_has_its_cause_and_the_engine_that_takes_over() -> None:
    policy = EnginePolicy()
    assert policy.explain(Waiting(120_000), "spark") == (
        "lag is 120,000 messages, above 50,000; Spark takes over from the workers"
    )
    assert policy.explain(Waiting(7), "workers") == "lag is 7 messages, below 1,000; the workers take over from Spark"
