"""The `redis-streams` source: the driver plans batches, tasks read offset ranges."""
