"""The greatest numbers of Java and Spark."""

GREATEST_LONG = 2**63 - 1
GREATEST_TIMESTAMP_MS = GREATEST_LONG // 1000
"""The last millisecond of a Spark timestamp: later ones become null."""
