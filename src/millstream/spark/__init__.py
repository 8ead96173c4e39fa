"""millstream on Apache Spark: the `redis-streams` data source and the engine that runs handlers on it.

Only this package imports pyspark.
"""
