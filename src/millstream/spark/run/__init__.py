"""The implementation of `millstream run`: the Spark session, the queries and their supervisor."""
