"""Handlers and stages as data, and one attempt of a handler: pure, apart from `sql_inbox`."""
