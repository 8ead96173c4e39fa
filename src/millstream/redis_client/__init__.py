"""The one way to Redis: connections, scripts, errors in our words, key names, and an embedded server."""
