"""What commands say of a handler, an app or a stream that does not exist: what may have been meant."""

import pytest

from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys
from tests.support.commandline import call

pytestmark = [pytest.mark.cli]

LISTED = "millstream info shows those that have"


@pytest.fixture
def known(client: Client) -> Client:
    """A Redis on which three handlers of two apps have run."""
    for keys in (
        HandlerKeys("shop", "total", "orders"),
        HandlerKeys("shop", "pay", "payments"),
        HandlerKeys("bank", "book", "payments"),
    ):
        client.execute("XGROUP", "CREATE", keys.stream, keys.group, "0", "MKSTREAM")
        client.execute("HSET", keys.meta, "owner", "workers")
    return client


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("key", "list", "shop.totl"), "no handler 'shop.totl' has run on this Redis; did you mean 'shop.total'?"),
        (("why", "shop.totl", "ann"), "no handler 'shop.totl' has run on this Redis; did you mean 'shop.total'?"),
        (("pause", "other.thing"), f"no handler 'other.thing' has run on this Redis; {LISTED}"),
        (("history", "shop.totl"), "no handler 'shop.totl' has run on this Redis; did you mean 'shop.total'?"),
        (("dlq", "list", "shp"), "no handler of an app 'shp' has run on this Redis; did you mean 'shop'?"),
        (("dlq", "list", "total"), "no handler of an app 'total' has run on this Redis; write shop.total"),
        (
            ("pause", "shop.total", "--stream", "order"),
            "no handler 'shop.total' has run on 'order'; did you mean 'orders'?",
        ),
        (("pause", "shop.total", "--stream", "x"), f"no handler 'shop.total' has run on 'x'; {LISTED}"),
    ],
)
def test_an_unknown_name_is_followed_by_the_one_that_may_be_meant(
    known: Client, words: tuple[str, ...], message: str
) -> None:
    refused = call(*words, url=known.url)
    assert (refused.code, refused.out, refused.err) == (1, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("shp", "did you mean 'shop'?"),
        ("shop.total", "give the name of an app alone: shop"),
        ("book", "the app of bank.book is bank"),
        ("other", LISTED),
    ],
)
def test_info_of_an_unknown_app_says_what_may_be_meant_and_nothing_of_streams(
    known: Client, name: str, hint: str
) -> None:
    shown = call("info", name, url=known.url)
    said = f"no handler or stage of an app named {name!r} has run on this Redis; {hint}\n"
    assert (shown.code, shown.out, shown.err) == (1, "", said)


def test_a_known_handler_without_samples_is_no_error_of_its_history(known: Client) -> None:
    shown = call("history", "shop.total", url=known.url)
    assert (shown.code, "there are no such samples since then" in shown.err) == (0, True)


def test_an_entry_is_published_to_no_stream_without_a_name(client: Client) -> None:
    """As of a variable of the shell that is not set."""
    refused = call("publish", "", "amount=10", url=client.url)
    assert (refused.code, "the stream name is empty" in refused.err) == (2, True)
    assert client.execute("DBSIZE") == 0
