"""The worker: runs the handlers of an app on Redis Streams, in milliseconds, as one of any number of workers."""

from millstream.worker.handler_steps import Pipeline
from millstream.worker.loop import ReadingLoop
from millstream.worker.policy import WorkerPolicy

__all__ = ["Pipeline", "ReadingLoop", "WorkerPolicy"]
