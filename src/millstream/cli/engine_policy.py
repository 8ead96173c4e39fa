"""EnginePolicy: which engine should run an app, by its lag. It does no I/O and reads no clock."""

from dataclasses import dataclass
from typing import Literal

from millstream.admin.waiting_messages import Waiting
from millstream.errors import ConfigError

Engine = Literal["workers", "spark"]


@dataclass(frozen=True, kw_only=True)
class EnginePolicy:
    """The limits at which the engine of an app changes.

    * `spark_above`: Spark takes over from the workers above so many waiting messages
    * `workers_below`: the workers take over from Spark below so many
    * `minimum_ms`: how long an engine runs at least before it is changed, in milliseconds

    Between the two limits the engine that runs goes on. Raises ConfigError unless `spark_above` is the higher one.
    """

    spark_above: int = 50_000
    workers_below: int = 1_000
    minimum_ms: float = 300_000.0

    def __post_init__(self) -> None:
        if self.spark_above <= self.workers_below:
            raise ConfigError(
                f"--spark-above {self.spark_above} must be greater than --workers-below {self.workers_below}: between "
                "them the engine that runs goes on, so that it does not change all the time"
            )

    @property
    def counted(self) -> int:
        """How many messages must be counted for a decision: more change nothing."""
        return self.spark_above + 1

    def first(self, lag: Waiting) -> Engine:
        """The engine to start with."""
        return "spark" if lag.count > self.spark_above else "workers"

    def decide(self, lag: Waiting | None, engine: Engine, since_ms: float) -> Engine:
        """The engine that should run now, where `engine` has run for `since_ms` milliseconds.

        `lag`: the messages that wait; None if that is unknown, which changes nothing. A lower bound never brings the
        workers.
        """
        if lag is None or since_ms < self.minimum_ms:
            return engine
        if engine == "workers":
            return self.first(lag)
        return "workers" if lag.count < self.workers_below and not lag.is_partial else "spark"

    def explain(self, lag: Waiting, engine: Engine) -> str:
        """The line of the log for a change to `engine`."""
        count = f"{'at least ' if lag.is_partial else ''}{lag.count:,}"
        if engine == "spark":
            return f"lag is {count} messages, above {self.spark_above:,}; Spark takes over from the workers"
        return f"lag is {count} messages, below {self.workers_below:,}; the workers take over from Spark"
