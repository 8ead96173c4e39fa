"""millstream: Redis Streams processed reliably, in order per key, on workers and on Apache Spark."""

from millstream.app import App, load_app
from millstream.errors import MillstreamError, Reject
from millstream.model import EntryId, Message, Retry, State
from millstream.stages import Rows

__all__ = ["App", "EntryId", "Message", "MillstreamError", "Reject", "Retry", "Rows", "State", "load_app"]
__version__ = "0.1.0"
