"""Worker: runs the handlers of an app on Redis Streams, as one of any number of workers. Times are in milliseconds."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.worker.handler_steps import HandlerSteps
    from millstream.worker.loop import ReadingLoop
    from millstream.worker.policy import WorkerPolicy
    from millstream.worker.process.embedded_worker import EmbeddedWorker
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.worker.handler_steps": ("HandlerSteps",),
            "millstream.worker.loop": ("ReadingLoop",),
            "millstream.worker.policy": ("WorkerPolicy",),
            "millstream.worker.process.embedded_worker": ("EmbeddedWorker",),
        },
    )

__all__ = ["EmbeddedWorker", "HandlerSteps", "ReadingLoop", "WorkerPolicy"]
