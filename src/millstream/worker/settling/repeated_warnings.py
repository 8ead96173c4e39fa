"""RepeatedWarnings: warnings of a condition that lasts, which is found again and again."""

import logging
from collections import defaultdict
from functools import partial

from millstream.clock import Every
from millstream.worker.context import WorkerContext

_EVERY_MS = 60_000.0


class RepeatedWarnings:
    """Logs each text once a minute at most, with the handler's name before it."""

    def __init__(self, logger: logging.Logger, context: WorkerContext) -> None:
        self._logger = logger
        self._label = context.handler.label
        self._clock = context.clock
        self._limits: defaultdict[str, Every] = defaultdict(partial(Every, _EVERY_MS))

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless one of the same text was logged in the last minute; `args` may differ."""
        if self._limits[text].is_due(self._clock.monotonic_ms()):
            self._logger.warning("%s: %s", self._label, text % args)
