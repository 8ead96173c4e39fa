"""What `millstream run` does: the session, the queries and their supervisor."""
