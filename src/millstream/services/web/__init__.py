"""What every HTTP service shares: listening, tokens, limits, and error responses."""
