"""URLs of Redis deployments, and addresses to serve on."""

import pytest

from millstream.cli.options import parse_address
from millstream.errors import ConfigError
from millstream.redis_client.deployments import parse_route
from millstream.redis_client.urls import hosts, url_of_node

pytestmark = [pytest.mark.cli, pytest.mark.groups]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1", "redis://r:7"),
        ("rediss://me:s%40cret@h:1/3?ssl_ca_certs=/ca", "rediss://me:s%40cret@r:7/3?ssl_ca_certs=/ca"),
        ("redis+sentinel://me:s@a:1,b:2/mymaster/3", "redis://me:s@r:7/3"),
        ("redis+sentinel://a/mymaster", "redis://r:7/"),
        ("rediss+cluster://me:s@a:1,b:2/0", "rediss://me:s@r:7"),
        ("unix://me:s@/run/redis.sock?db=2", "redis://me:s@r:7?db=2"),
    ],
)
def test_the_url_of_another_node_keeps_the_credentials_and_options_of_the_deployment(url: str, expected: str) -> None:
    assert url_of_node(url, ("r", 7)) == expected


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert url_of_node("redis://h", ("::1", 7)) == "redis://[::1]:7"
    assert hosts("me:s@[::1]:7,[fe80::1],h:8,i", 6379) == [("::1", 7), ("fe80::1", 6379), ("h", 8), ("i", 6379)]


@pytest.mark.parametrize(
    ("netloc", "words"), [("h:x", "port of a host is not a number"), ("::1", "brackets enclose an IPv6 address")]
)
def test_hosts_that_cannot_be_read_are_refused_with_the_reason(netloc: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_route(f"redis+cluster://{netloc}", 1_000)


def test_sentinels_and_seeds_of_clusters_may_have_addresses_of_ipv6() -> None:
    for url in ("redis+cluster://[::1]:7000", "redis+sentinel://me:pw@[::1]:26379,[::1]/mymaster/0"):
        parse_route(url, 1_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        (":9464", ("127.0.0.1", 9464)),
        ("[::]:9464", ("::", 9464)),
        ("metrics.internal:80", ("metrics.internal", 80)),
    ],
)
def test_an_address_to_serve_on_is_a_port_on_this_machine_unless_it_names_a_host(
    text: str, expected: tuple[str, int] | None
) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["x", "host", "host:", "host:x", "1:65536", "::1:80", "-1", "[::1]"])
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address: write PORT, HOST:PORT"):
        parse_address(text)
