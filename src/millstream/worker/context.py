"""WorkerContext: the state that the parts of a reading loop share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from millstream.clock import Clock
from millstream.delivery.reliable_stream import Delivery
from millstream.handlers.handler import Handler
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from millstream.worker.breaker import HandlerBreaker
from millstream.worker.fetch_outage import FetchOutage
from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.in_flight import InFlight
from millstream.worker.loop_metrics import LoopMetrics
from millstream.worker.policy import WorkerPolicy


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """Shared state of a reading loop, for its parts.

    * `client`, `blocking_client`: connections for quick commands, and for reads that block
    * `on_suspect`: called with an entry that may have crashed its worker
    * `cancel_run`: called with an entry that must not run any longer
    * `traceback_of_run`: returns where the handler is in its run of an entry, if that is known
    * `breaker`: the handler's breaker in this process
    * `give_up`: returns True when waiting for Redis is pointless, as the stop deadline has passed
    * `fetch_outage`: whether Redis refuses the fetches
    """

    handler: Handler
    steps: HandlerSteps
    in_flight: InFlight
    loop_metrics: LoopMetrics
    clock: Clock
    policy: WorkerPolicy
    consumer: str
    start: Literal["earliest", "latest"]
    url: str = field(repr=False)
    client: Client
    blocking_client: Client
    on_suspect: Callable[[Delivery], None]
    cancel_run: Callable[[Delivery], None]
    traceback_of_run: Callable[[Delivery], TracebackType | None]
    breaker: HandlerBreaker
    give_up: Callable[[], bool]
    fetch_outage: FetchOutage

    def keys_of(self, stream: str) -> HandlerKeys:
        """Return the names of the handler's keys on a stream."""
        return HandlerKeys(self.handler.app, self.handler.name, stream)
