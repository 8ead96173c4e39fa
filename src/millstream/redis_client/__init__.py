"""The only access to Redis: connections, scripts, error translation, key names, and an embedded server."""
