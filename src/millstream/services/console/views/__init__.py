"""The pages of the console: what each reads from Redis, and what its forms do."""

from millstream.services.console.pages import Page
from millstream.services.console.rights import Level
from millstream.services.console.views import (
    delayed,
    deployment,
    finding,
    groups,
    handler_list,
    handlers,
    keys,
    letter_edits,
    letters,
    redrives,
    streams,
    stuck,
    workers,
)
from millstream.services.console.views.overview import overview
from millstream.services.console.views.queries import queries

PAGES: tuple[Page, ...] = (
    Page(path="/", level=Level.FIGURES, view=overview, is_live=True),
    Page(path="/stuck", level=Level.PAYLOADS, view=stuck.stuck, is_live=True),
    Page(path="/stuck/unpark", method="POST", level=Level.OPERATE, view=stuck.unpark_selected),
    Page(path="/find", level=Level.FIGURES, view=finding.find),
    Page(path="/handlers", level=Level.FIGURES, view=handler_list.handlers, is_live=True),
    Page(path="/handler", level=Level.FIGURES, view=handlers.handler, is_live=True),
    Page(path="/handler/pause", method="POST", level=Level.OPERATE, view=handlers.pause),
    Page(path="/handler/resume", method="POST", level=Level.OPERATE, view=handlers.resume),
    Page(path="/handler/rate", method="POST", level=Level.OPERATE, view=handlers.rate),
    Page(path="/handler/rate/clear", method="POST", level=Level.OPERATE, view=handlers.clear_rate),
    Page(path="/key", level=Level.PAYLOADS, view=keys.key, is_live=True),
    Page(path="/key/park", method="POST", level=Level.OPERATE, view=keys.park),
    Page(path="/key/unpark", method="POST", level=Level.OPERATE, view=keys.unpark),
    Page(path="/key/skip", method="POST", level=Level.OPERATE, view=keys.skip),
    Page(path="/key/reset", method="POST", level=Level.ADMIN, view=keys.reset),
    Page(path="/letters", level=Level.PAYLOADS, view=letters.letters, is_live=True),
    Page(path="/letter", level=Level.PAYLOADS, view=letters.letter),
    Page(path="/letter/edit", level=Level.ADMIN, view=letter_edits.edit),
    Page(path="/letter/edit", method="POST", level=Level.ADMIN, view=letter_edits.redrive),
    Page(path="/letters/export", method="POST", level=Level.PAYLOADS, view=letters.export),
    Page(path="/letters/redrive", method="POST", level=Level.OPERATE, view=letters.redrive),
    Page(path="/letters/redrive/stop", method="POST", level=Level.OPERATE, view=redrives.stop),
    Page(path="/letters/purge", method="POST", level=Level.ADMIN, view=letters.purge),
    Page(path="/streams", level=Level.FIGURES, view=streams.streams, is_live=True),
    Page(path="/stream", level=Level.FIGURES, view=streams.stream, is_live=True),
    Page(path="/tail", level=Level.PAYLOADS, view=streams.tail, is_live=True),
    Page(path="/group", level=Level.FIGURES, view=groups.group, is_live=True),
    Page(path="/group/set-id", method="POST", level=Level.ADMIN, view=groups.set_id),
    Page(path="/workers", level=Level.FIGURES, view=workers.workers, is_live=True),
    Page(path="/workers/drain", method="POST", level=Level.ADMIN, view=workers.drain),
    Page(path="/queries", level=Level.FIGURES, view=queries, is_live=True),
    Page(path="/delayed", level=Level.FIGURES, view=delayed.delayed, is_live=True),
    Page(path="/delayed/cancel", method="POST", level=Level.ADMIN, view=delayed.cancel),
    Page(path="/redis", level=Level.FIGURES, view=deployment.redis, is_live=True),
    Page(path="/audit", level=Level.PAYLOADS, view=deployment.audit, is_live=True),
)
"""All pages that need a viewer. `/login`, `/logout`, `/console.css`, `/console.js` and `/healthz` need none."""
