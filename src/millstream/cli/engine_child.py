"""A command that `millstream auto` runs as its child: it stops in order when its parent dies.

The parent holds the other end of standard input open for as long as it lives.
"""

import os
import signal
import sys
import threading
import time

from millstream.cli.main import main as run_command

_STDIN = 0
_ORPHAN_END_S = 60.0
"""How long the command may take to stop after its parent died."""


def main() -> None:
    """Run `millstream ARGUMENTS` until it ends, or until the parent dies."""
    parent = os.dup(_STDIN)  # no process that the command starts inherits this descriptor
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, _STDIN)
    os.close(nothing)
    threading.Thread(target=_stop_with, args=(parent,), daemon=True).start()
    run_command(sys.argv[1:])


def _stop_with(parent: int) -> None:
    # Not by a buffered reader: it would hold a lock that Python needs at its end.
    while os.read(parent, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHAN_END_S)
    os.kill(os.getpid(), signal.SIGKILL)
