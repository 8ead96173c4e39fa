"""Publishing: one message or many, each exactly once."""
