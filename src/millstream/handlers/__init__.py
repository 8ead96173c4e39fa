"""Handlers and stages as data, and single attempts of handlers: without I/O, except for `sql_inbox`."""
