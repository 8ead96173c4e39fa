"""Commits, retries and dead letters of finished runs, and the renewal of claims and key leases meanwhile."""
