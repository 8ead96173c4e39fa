"""Metrics, traces, health pages and alerts."""
