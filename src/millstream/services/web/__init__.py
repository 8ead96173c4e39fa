"""The parts that all HTTP services share: listening, tokens, limits, and error responses."""
