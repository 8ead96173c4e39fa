"""Repair of an append-only file whose server was killed while it wrote a transaction.

Redis (7.0 to 8.2 at least) then removes only the last incomplete command. The rest of the transaction stays in the file,
without its end, and takes effect at the start after the next, together with what was written since. Valkey 9.1 removes
the whole transaction (valkey-io/valkey, pull request 4342).
"""

import logging
import re
import subprocess
from pathlib import Path

from millstream.errors import ServerError

logger = logging.getLogger(__name__)

_ANALYZED = re.compile(r"AOF analyzed: filename=(\S+), size=\d+, ok_up_to=(\d+)")
_MULTI, _EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"


def drop_unfinished_transaction(program: str, folder: Path, *, timeout_ms: float) -> None:
    """Remove a transaction without its end from the end of the append-only file of a server that does not run.

    * `program`: the server's; under the name `redis-check-aof` it checks the file instead
    * `folder`: the server's data folder
    * `timeout_ms`: bounds the check of a file

    Raises `ServerError` if the check takes longer. Leaves every other fault of the file to the server, which says what
    to do.
    """
    for manifest in folder.glob("*/*.manifest"):
        command = ["redis-check-aof", manifest.name]
        try:
            checked = subprocess.run(
                command,
                executable=program,
                cwd=manifest.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=timeout_ms / 1000,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"the append-only file {manifest} was not checked in time: allow its server more"
            ) from None
        analyzed = _ANALYZED.findall(checked.stdout.decode(errors="replace"))
        if checked.returncode and analyzed:
            _drop_tail(manifest.parent / analyzed[-1][0], int(analyzed[-1][1]))


def _drop_tail(path: Path, valid_bytes: int) -> None:
    with path.open("rb+") as file:
        file.seek(valid_bytes)
        tail = file.read()
        if tail.startswith(_MULTI) and _EXEC not in tail:
            file.truncate(valid_bytes)
            logger.warning(
                "transaction without an end in %s: its server was killed; removed the last %d bytes", path, len(tail)
            )
