"""The handler engine on Spark: one micro-batch from blocks to committed effects."""
