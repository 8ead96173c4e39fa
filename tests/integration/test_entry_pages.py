"""Pages of the entries of a stream are bounded in bytes, also where large entries begin behind small ones."""

import pytest

from millstream.admin.entry_pages import newest_first, read_entries
from millstream.redis_client.client import Client

pytestmark = [pytest.mark.cli]

MB = 1_000_000


def add(client: Client, count: int, size: int) -> None:
    client.pipeline([("XADD", "in", "*", "n", b"x" * size) for _ in range(count)])


def test_of_large_entries_behind_small_ones_at_most_nine_more_than_fit_are_read(client: Client) -> None:
    for small in (5, 15, 35, 75):
        client.execute("DEL", "in")
        add(client, 40, MB)
        add(client, small, 1)
        found = [len(pairs[1]) for _, pairs in newest_first(client, "in", most=1_000)]
        assert found[:small] == [1] * small
        assert 1 <= len(found[small:]) <= 10


def test_as_many_as_fit_are_read_and_no_more_where_all_have_one_size(client: Client) -> None:
    add(client, 40, 300_000)
    assert len(list(newest_first(client, "in", most=1_000))) == 5
    client.execute("DEL", "in")
    add(client, 400, 9_000)
    assert 100 <= len(list(newest_first(client, "in", most=1_000))) <= 120


def test_a_page_ends_with_the_entry_that_makes_a_million_bytes(client: Client) -> None:
    add(client, 7, 1)
    add(client, 40, MB)
    page = read_entries(client, "in", "-")
    assert [len(pairs[1]) for _, pairs in page.entries] == [1] * 7 + [MB]
    assert page.next_id is not None
