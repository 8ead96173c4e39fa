"""The sources: `redis-streams`, where the driver plans batches and tasks read offset ranges; and `redis-state`."""
