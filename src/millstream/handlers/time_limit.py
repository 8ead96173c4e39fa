"""TimeLimit: what an engine raises in a handler that takes longer than its time limit."""


class TimeLimit(BaseException):
    """A handler exceeded its time limit. Not an Exception, so that `except Exception` in a handler lets it pass."""
