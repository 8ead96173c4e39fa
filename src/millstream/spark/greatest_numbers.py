"""The greatest numbers of Java and Spark."""

MAX_LONG = 2**63 - 1
MAX_TIMESTAMP_MS = MAX_LONG // 1000
"""The last millisecond of a Spark timestamp: later ones become null."""
