"""Worker: runs the handlers of an app on Redis Streams, as one of any number of workers. Times are in milliseconds."""

from millstream.worker.handler_steps import HandlerSteps
from millstream.worker.loop import ReadingLoop
from millstream.worker.policy import WorkerPolicy

__all__ = ["HandlerSteps", "ReadingLoop", "WorkerPolicy"]
