"""Publishing: one message or many, each once."""
