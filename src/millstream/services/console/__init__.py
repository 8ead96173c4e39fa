"""The operators' console: pages that show what needs attention, and forms that act on it."""

from millstream.services.console.app import console_app
from millstream.services.console.guard import Authorize
from millstream.services.console.rights import Level, Viewer

__all__ = ["Authorize", "Level", "Viewer", "console_app"]
