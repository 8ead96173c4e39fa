"""Which health URLs a master calls, and at which addresses."""

import ipaddress

import pytest

from millstream.errors import ConfigError
from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
from millstream.services.master.scopes import Tokens
from millstream.services.web.errors import Refused

pytestmark = [pytest.mark.master]


@pytest.mark.parametrize(
    ("entries", "url", "address"),
    [
        (LOOPBACK, "http://127.0.0.1:80/api/health", "127.0.0.1"),
        (LOOPBACK, "https://localhost/health?x=1", "127.0.0.2"),
        (LOOPBACK, "http://[::1]:8080/", "::1"),
        (LOOPBACK, "http://[::ffff:127.0.0.1]:8080/", "::ffff:127.0.0.1"),
        (["10.0.0.0/8:8080"], "http://10.1.2.3:8080/", "10.1.2.3"),
        (["10.0.0.0/8"], "http://pod-1.internal:99/", "10.1.2.3"),
        (["*.internal:8080"], "http://pod-1.internal:8080/", "10.1.2.3"),
        (["pods.internal"], "http://PODS.internal./", "93.184.216.34"),
        (["[fd00::]/8:8080"], "http://[fd00::7]:8080/", "fd00::7"),
        (["fd00::/8"], "http://[fd00::7]:8080/", "fd00::7"),
    ],
)
def test_a_health_url_that_is_allowed_is_called(entries: list[str], url: str, address: str) -> None:
    allowed = AllowList(entries)
    assert allowed.permits(allowed.parse(url), ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("entries", "url"),
    [
        (LOOPBACK, "http://10.0.0.1/"),
        (LOOPBACK, "http://[fd00::1]/"),
        (["127.0.0.1:8080"], "http://127.0.0.1:8081/"),
        (["127.0.0.1:8080"], "http://127.0.0.1/"),
        (["*.internal"], "http://internal/"),
        (["*.internal"], "http://evilinternal/"),
        (["pods.internal:80"], "http://pods.internal:81/"),
        (LOOPBACK, "ftp://127.0.0.1/"),
        (LOOPBACK, "file:///etc/passwd"),
        (LOOPBACK, "http://user:password@127.0.0.1/"),
        (LOOPBACK, "http://10.0.0.1#@127.0.0.1/"),
        (LOOPBACK, "http://127.0.0.1\\@10.0.0.1/"),
        (LOOPBACK, "http://127.0.0.1:99999/"),
        (LOOPBACK, "http:///nowhere"),
        (LOOPBACK, "http://127.0.0.1/a b"),
        (LOOPBACK, "http://127.0.0.1/\r\nX: y"),
        (LOOPBACK, "http://127.0.0.1/" + "a" * 3_000),
        ([], "http://127.0.0.1/"),
    ],
)
def test_a_url_that_is_not_allowed_is_refused_before_its_host_is_resolved(entries: list[str], url: str) -> None:
    with pytest.raises(Refused) as refused:
        AllowList(entries).parse(url)
    assert refused.value.status in (403, 422)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entries", "host", "address"),
    [
        (["10.0.0.0/8"], "pod-1.internal", "169.254.169.254"),
        (["10.0.0.0/8"], "pod-1.internal", "127.0.0.1"),
        (["pod-1.internal"], "pod-1.internal", "127.0.0.1"),
        (["pod-1.internal"], "pod-1.internal", "169.254.169.254"),
        (["pod-1.internal"], "pod-1.internal", "0.0.0.0"),
        (["pod-1.internal"], "pod-1.internal", "::ffff:127.0.0.1"),
        (["pod-1.internal"], "pod-1.internal", "fe80::1"),
        (["localhost"], "localhost", "127.0.0.1"),
    ],
)
def test_a_host_that_resolves_to_a_forbidden_address_is_not_called(entries: list[str], host: str, address: str) -> None:
    allowed = AllowList(entries)
    target = allowed.parse(f"http://{host}:8080/")
    assert not allowed.permits(target, ipaddress.ip_address(address))


@pytest.mark.parametrize("entry", ["", "http://a", "a:b", "a:0", "a:70000", "a b", "10.0.0.0/99:x", "[::1", "*"])
def test_an_entry_of_the_allow_list_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError):
        AllowList([entry])


@pytest.mark.parametrize("token", ["", "short", "with a space in the middle", "ungewöhnliche-zeichen-hier"])
def test_a_token_that_is_easy_to_guess_or_hard_to_send_is_refused(token: str) -> None:
    with pytest.raises(ConfigError):
        Tokens().add(token)


def test_a_token_allows_only_its_scopes() -> None:
    tokens = Tokens()
    tokens.add("reader-0123456789", ["read"])
    tokens.add("everything-0123456789")
    assert tokens.allows("reader-0123456789", "read") is True
    assert tokens.allows("reader-0123456789", "acknowledge") is False
    assert tokens.allows("everything-0123456789", "acknowledge") is True
    assert tokens.allows("somebody-0123456789", "read") is None
    assert tokens.allows(None, "read") is None
