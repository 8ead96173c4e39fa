"""Stream leases: shares whole streams among the consumers of a service, each stream with one owner at a time.

* `Balancer`: one consumer; it is notified of the streams assigned to it and revoked from it
* `announce`: adds a stream to a service

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
