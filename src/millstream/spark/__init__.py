"""millstream on Apache Spark: the `redis-streams` source and sink, and the engine that runs handlers on them.

Only this package and `pyspark_millstream` import pyspark.
"""
