"""Search over all: the page of the one hit, or a list of hits."""

from collections.abc import Mapping
from shlex import quote

from starlette.responses import Response

from millstream.admin.search import Found, Hit, search
from millstream.redis_client.escaping import escape, unescape
from millstream.services.console.pages import PageRequest


def find(page: PageRequest) -> Response:
    """What has the name, the key or the id that is looked for: its page if it is one, else a list."""
    text = page.query.get("q", "").strip()
    wanted = unescape(text)
    hides_keys = not page.display.is_shown(wanted)
    found = Found()
    if wanted:
        with_content = page.may("payloads")
        found = search(
            page.client,
            wanted,
            with_entries=with_content,
            with_keys=with_content and not hides_keys,
            known=page.known_handlers(),
        )
    exact = [one for one in found.hits if one.exact]
    only = exact if len(exact) == 1 else found.hits
    if len(only) == 1 and not found.is_partial:
        path, parameters = _page_of(only[0])
        return page.redirect(path, **parameters)
    return page.render(
        "find.html",
        text=text,
        found=found,
        hits=[(one, page.url(path, **parameters)) for one in found.hits for path, parameters in [_page_of(one)]],
        hides_keys=hides_keys and bool(wanted),
        command=f"millstream find {quote(text) if text else 'TEXT'}",
    )


def _page_of(hit: Hit) -> tuple[str, Mapping[str, str]]:
    """The page of a hit, and its parameters."""
    handler, stream, entry_id = hit.handler or "", escape(hit.stream or ""), hit.id or ""
    match hit.kind:
        case "handler":
            return "/handler", {"name": handler}
        case "stream":
            return "/stream", {"name": stream}
        case "entry":
            return "/stream", {"name": stream, "from": entry_id}
        case "dead letter":
            return "/letter", {"handler": handler, "stream": stream, "id": entry_id}
        case "key":
            return "/key", {"handler": handler, "stream": stream, "key": escape(hit.key or b"")}
