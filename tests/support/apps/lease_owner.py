"""A process that holds leases on streams, and writes under each of them, with its token, as often as it can.

Called with the URL of the Redis that its balancer is to use, that of the one that it writes to, its name, its lease in
milliseconds, and the fraction of the streams that may move in a second. A write is refused where one under a greater
token was before it, as any fenced store would. On SIGUSR1 it stops itself, as by SIGSTOP, where that is worst: when it
has made sure that a lease holds, and not yet written under it.
"""

import os
import signal
import sys
import threading
import time
from functools import partial

from millstream.balancer import Balancer, BalancerPolicy, Lease, StreamAdded, StreamDisowned
from millstream.errors import LeaseLost, Unavailable
from millstream.redis_client.client import Client

SERVICE = "calls"
WRITES, REFUSED, FENCES = "writes", "refused", "fences"
_WRITE = """
for i = 2, #ARGV, 2 do
  local fence = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or 0)
  local token = tonumber(ARGV[i + 1])
  if token < fence then
    redis.call('XADD', KEYS[3], '*', 'stream', ARGV[i], 'token', ARGV[i + 1], 'by', ARGV[1])
  elseif token > fence then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    redis.call('XADD', KEYS[2], '*', 'stream', ARGV[i], 'token', ARGV[i + 1], 'by', ARGV[1])
  end
end"""
"""Only the first write under a token is kept: what matters is which process was allowed to, and when."""


def main(url: str, store: str, name: str, policy: BalancerPolicy) -> None:
    """Hold leases until SIGTERM."""
    stopping = threading.Event()
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGUSR1, lambda *_: stop_requested.set())
    signal.signal(signal.SIGCONT, lambda *_: continued.append(True))
    continued: list[bool] = []
    mine: dict[str, int] = {}
    to_release: list[Lease] = []
    with Client(store) as client, Balancer(url, SERVICE, consumer=name, policy=policy) as balancer:
        while not stopping.is_set():
            wait_s: float | None = 0.02
            while (notice := balancer.next(wait_s)) is not None:
                wait_s = 0.0
                if isinstance(notice, StreamAdded):
                    mine[notice.stream] = notice.lease.token
                elif isinstance(notice, StreamDisowned):
                    mine.pop(notice.stream, None)
                    if notice.why == "rebalanced":
                        to_release.append(notice.lease)
            release(balancer, to_release)
            tokens = [part for stream, token in list(mine.items()) for part in (stream, token)]
            if stop_requested.is_set():
                stop_requested.clear()
                continued.clear()
                os.kill(os.getpid(), signal.SIGSTOP)
                while not continued:  # in case it does not stop at once
                    time.sleep(0.005)
            write = partial(client.execute, "EVAL", _WRITE, 3, FENCES, WRITES, REFUSED, name, *tokens)
            client.retry_while_unavailable(write, what=name, give_up=stopping.is_set)


def release(balancer: Balancer, leases: list[Lease]) -> None:
    """Release these leases, and leave those for the next time that Redis does not answer for."""
    while leases:
        try:
            balancer.release(leases[-1])
        except Unavailable:
            return
        except LeaseLost:  # it has ended, or an earlier attempt released it and its reply was lost
            pass
        leases.pop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], BalancerPolicy(lease_ms=int(sys.argv[4]), moves=float(sys.argv[5])))
