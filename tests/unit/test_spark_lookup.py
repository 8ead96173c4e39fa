"""Spark imports `pyspark_millstream` in every session that uses any Python data source: its import does no harm."""

import importlib
import sys

import pytest
from pyspark.cloudpickle import dumps, loads
from pyspark.sql.datasource import DataSource

from millstream.spark.versions import SPARK_VERSION, SUPPORTED

pytestmark = pytest.mark.spark


def look_up(monkeypatch: pytest.MonkeyPatch, package: str = "pyspark_millstream") -> type[DataSource]:
    """What Spark finds: the class, as it arrives in another process (PySpark, `lookup_data_sources.py`)."""
    monkeypatch.delitem(sys.modules, package, raising=False)
    found = importlib.import_module(package).DefaultSource
    assert issubclass(found, DataSource)
    arrived: type[DataSource] = loads(dumps(found))  # type: ignore[no-untyped-call]
    return arrived


def test_spark_finds_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_up(monkeypatch).name() == "redis-streams"
    assert look_up(monkeypatch, "pyspark_millstream_state").name() == "redis-state"


def test_the_lookup_succeeds_on_an_unsupported_spark_and_the_use_names_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "millstream.spark.source.provider", raising=False)
    monkeypatch.delattr("pyspark.sql.datasource.DataSourceStreamReader")
    found = look_up(monkeypatch)
    assert found.name() == "redis-streams"
    with pytest.raises(ImportError, match=f"needs Spark {SUPPORTED}.* This is Spark {SPARK_VERSION}.*StreamReader"):
        found({})


def test_the_lookup_of_states_succeeds_on_an_unsupported_spark_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "millstream.spark.source.state_provider", raising=False)
    monkeypatch.delattr("pyspark.sql.datasource.DataSourceReader")
    found = look_up(monkeypatch, "pyspark_millstream_state")
    assert found.name() == "redis-state"
    with pytest.raises(ImportError, match=f"redis-state needs Spark {SUPPORTED}"):
        found({})
