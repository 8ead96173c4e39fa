"""What the services that speak HTTP share: listening, tokens, limits, and how they refuse."""
