"""The Spark session of `tests/spark` is this folder's as well."""

from tests.spark.conftest import spark

__all__ = ["spark"]
