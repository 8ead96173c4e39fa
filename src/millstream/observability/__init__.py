"""Metrics, traces, health endpoints and dead-letter alerts."""
