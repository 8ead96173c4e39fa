"""Keys whose states expire: what is expected of the apps `expiring` and `lasting` of `worker_app`, on either engine."""

from collections.abc import Mapping, Sequence

from millstream.model import EntryId
from tests.support.apps.worker_app import STATE_TTL_MS
from tests.support.keyed_workers import KeyedExpectations
from tests.support.workers import now_ms

KEYS = 8


class ExpiringExpectations(KeyedExpectations):
    """Expectations of an app whose states end; by the server's clock, which times all entries.

    * `ttl_ms`: how long its states last
    * `begun_anew`, `continued`: how many messages ran without the state that their key once had, and on the state of an
      earlier commit
    """

    ttl_ms = STATE_TTL_MS
    begun_anew = continued = 0

    def publish_more(self) -> None:
        """See Expectations."""
        self.publish_keys(6 * KEYS, KEYS, ms=2)

    def states_have_expired(self) -> bool:
        """Return whether all states have expired since the last commit."""
        last = self.client.execute("XREVRANGE", "out", "+", "-", "COUNT", 1)[0][0]
        return now_ms(self.client) >= EntryId.parse(last).ms + self.ttl_ms + 1

    def check_states(self, outputs: Sequence[Mapping[str, str]]) -> None:
        """Check the count of each message against that of the one before it in its key.

        It goes on if the message was committed before the state expired, and begins anew if the message was published
        after the millisecond of that. Between the two the message may have begun before or after.
        """
        self.begun_anew = self.continued = 0
        entries = self.client.execute("XRANGE", "out", "-", "+")
        last: dict[str, tuple[int, int]] = {}
        for row, (entry_id, _) in zip(outputs, entries, strict=True):
            committed_ms, count = EntryId.parse(entry_id).ms, int(row["count"])
            before, expires_ms = last.get(row["key"], (0, 0))
            if EntryId.parse(row["id"]).ms > expires_ms:
                assert count == 1, f"on a state that had expired at {expires_ms}: {row}"
                self.begun_anew += before > 0
            elif committed_ms < expires_ms:
                assert count == before + 1, f"the state lasts until {expires_ms}: {row}"
                self.continued += committed_ms + self.ttl_ms > expires_ms
            else:
                assert count in (1, before + 1), row
            last[row["key"]] = count, committed_ms + self.ttl_ms
