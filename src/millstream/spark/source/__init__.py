"""The `redis-streams` source: planning on the driver, reading in tasks."""
