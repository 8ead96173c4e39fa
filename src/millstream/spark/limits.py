"""The greatest numbers that Java and Spark have."""

GREATEST_LONG = 2**63 - 1
GREATEST_TIMESTAMP_MS = GREATEST_LONG // 1000
"""The last millisecond that Spark has a timestamp for: later ones are null there."""
