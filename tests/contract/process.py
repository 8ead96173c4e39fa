"""A worker process for handlers of the contract: `python -m tests.contract.process URL CASE...`."""

import signal
import sys
import threading

from millstream.testing.contract import app_of
from millstream.testing.contract_cases import CASES
from millstream.worker import ReadingLoop, WorkerPolicy

POLICY = WorkerPolicy(block_ms=100, claim_ms=3_000, sweep_ms=100, stop_ms=2_000)


def main(url: str, *names: str) -> None:
    """Run until SIGTERM."""
    app = app_of(case for case in CASES if case.name in names)
    loops = [ReadingLoop(handler, url, consumer="w1", policy=POLICY) for handler in app.handlers.values()]

    def stop(_signal: int, _frame: object) -> None:
        for loop in loops:
            loop.stop()

    signal.signal(signal.SIGTERM, stop)
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
