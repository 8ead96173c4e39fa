"""MasterClient: a consumer's HTTP client for its masters. Any master may answer; all may be unavailable for a while."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from millstream.clock import Backoff

_TIMEOUT_S = 5.0
_WAITS_MS = (50.0, 2_000.0)


@dataclass(frozen=True, slots=True)
class MasterResponse:
    """A master's answer: the HTTP status and the JSON object."""

    status: int
    body: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """True for a status of 2xx."""
        return 200 <= self.status < 300


class MasterClient:
    """Posts to masters in turn until one answers other than 429 or 5xx. Threads may share it."""

    def __init__(self, token: str, stopping: threading.Event) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(timeout=_TIMEOUT_S, headers=headers, trust_env=False, follow_redirects=False)
        self._stopping = stopping

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def post(self, urls: Sequence[str], body: Mapping[str, object], *, for_s: float) -> MasterResponse | str:
        """The first answer of one of `urls`, tried for `for_s` seconds; else the last error, as text.

        Each URL is tried at least once. The wait ends early when the consumer stops.
        """
        waited_s, backoff, problem = 0.0, Backoff(*_WAITS_MS), ""
        while True:
            for url in urls:
                try:
                    found = self._http.post(url, json=body)
                except httpx.HTTPError as error:
                    problem = f"{url}: {error or type(error).__name__}"
                    continue
                if found.status_code < 500 and found.status_code != 429:
                    return MasterResponse(found.status_code, _object(found))
                problem = f"{url}: {_object(found).get('error', found.status_code)}"
            wait_s = backoff.next_ms() / 1000
            if waited_s >= for_s or self._stopping.wait(wait_s):
                return problem
            waited_s += wait_s


def sibling_url(url: str, name: str) -> str:
    """The URL of another call of the same master: `.../acknowledge` -> `.../fail`."""
    return f"{url.rstrip('/').rpartition('/')[0]}/{name}"


def _object(response: httpx.Response) -> Mapping[str, Any]:
    try:
        found = response.json()
    except ValueError:
        return {"error": response.text[:200]}
    return found if isinstance(found, dict) else {}
