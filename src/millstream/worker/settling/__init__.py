"""What happens to what was run: commits, retries, dead letters; and how claims are renewed meanwhile."""
