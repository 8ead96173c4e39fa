"""Fetching: a worker reads entries through a consumer group, or routes them to key queues and leases keys."""
