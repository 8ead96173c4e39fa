"""The handler engine on Spark: one micro-batch from rows to committed effects."""
