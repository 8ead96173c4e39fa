"""How many messages are reserved of a rate."""

from collections import Counter

import pytest

from millstream.delivery.commit_store import CommitStore
from millstream.delivery.rate_override import RateOverride


def count_reservations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how many messages of each stream this process reserves from now on."""
    reserved: Counter[str] = Counter()
    reserve = CommitStore.reserve_rate

    def counted(
        store: CommitStore, stream: str, rate: float, count: int, override: RateOverride | None = None
    ) -> float | None:
        reserved[stream] += count
        return reserve(store, stream, rate, count, override)

    monkeypatch.setattr(CommitStore, CommitStore.reserve_rate.__name__, counted)
    return reserved
