"""Orderings of a worker: without order, by key, by stream and by partition."""
