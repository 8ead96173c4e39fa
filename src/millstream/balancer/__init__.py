"""Whole streams shared among the consumers of a service: each has one owner at a time, and a new one when that is gone.

* `Balancer`: one consumer; it is told which streams are its own, and which are not any more
* `announce`: gives a service one more stream to share

After redis-stream-client-go; `docs/leases.md` goes through its architecture.
"""

from millstream.balancer.balancer import Balancer
from millstream.balancer.notifications import Lease, Notice, StreamAdded, StreamDisowned, StreamExpired, Terminated
from millstream.balancer.policy import BalancerPolicy
from millstream.balancer.protocol import announce

__all__ = [
    "Balancer",
    "BalancerPolicy",
    "Lease",
    "Notice",
    "StreamAdded",
    "StreamDisowned",
    "StreamExpired",
    "Terminated",
    "announce",
]
