"""How many unknown tokens clients of the console may send, and that no stranger keeps the others out."""

import pytest
from starlette.requests import Request

from millstream.services.console.login_limits import LoginLimits, TooManyGuesses, address_of

pytestmark = [pytest.mark.cli]


class Guesser:
    """Clients that send unknown tokens, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.limits = LoginLimits(monotonic=lambda: self.now_s)
        self.sent = 0

    def wait_s(self, address: str, browsers: str | None = None, token: str | None = None) -> float:
        """Send a new unknown token, or this one; returns how long it has to wait, 0 if it was admitted."""
        self.sent += 1
        token = token or f"guess {self.sent}"
        try:
            client = self.limits.admit(token, address, browsers)
        except TooManyGuesses as error:
            return error.wait_s
        self.limits.count_unknown(token, client)
        return 0.0

    def admitted(self, seconds: int, *addresses: str) -> int:
        """How many tokens are admitted if each address sends one each second."""
        count = 0
        for _ in range(seconds):
            self.now_s += 1
            count += sum(self.wait_s(address) == 0 for address in addresses)
        return count


def test_an_address_waits_twice_as_long_after_each_unknown_token_up_to_a_minute() -> None:
    guesser = Guesser()
    assert [guesser.wait_s("a") for _ in range(5)] == [0] * 5
    waits = []
    for _ in range(9):
        waits.append(guesser.wait_s("a"))
        guesser.now_s += waits[-1]
        assert guesser.wait_s("a") == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert guesser.wait_s("b") == 0, "another address"
    guesser.now_s += 1_000
    assert [guesser.wait_s("a") for _ in range(5)] == [0] * 5, "it is forgotten"


def test_many_addresses_together_send_one_unknown_token_a_second() -> None:
    guesser = Guesser()
    assert guesser.admitted(100, *(f"address {n}" for n in range(200))) <= 150


def test_an_address_that_has_sent_a_valid_token_is_exempt_from_the_limit_of_all() -> None:
    guesser = Guesser()
    guesser.limits.count_valid("operator")
    guesser.admitted(10, *(f"address {n}" for n in range(200)))
    assert guesser.wait_s("a new address") > 0
    assert guesser.wait_s("operator") == 0


def test_a_browser_that_has_logged_in_before_is_not_kept_out_by_guesses_from_its_address() -> None:
    guesser = Guesser()
    guesser.admitted(300, "proxy")
    assert guesser.wait_s("proxy") > 0
    assert guesser.wait_s("proxy", "browsers of ann") == 0
    for _ in range(5):
        guesser.wait_s("proxy", "browsers of ann")
    assert guesser.wait_s("proxy", "browsers of ann") > 0, "it may not guess without end either"
    assert guesser.wait_s("elsewhere", "browsers of ann") == 0, "where others that know its token guess"


def test_a_program_that_repeats_an_old_token_delays_no_other() -> None:
    guesser = Guesser()
    assert [guesser.wait_s("host", token="old") for _ in range(1_000)] == [0] * 1_000
    assert guesser.wait_s("host") == 0


def test_the_memory_of_the_limits_is_bounded() -> None:
    guesser = Guesser()
    for n in range(20_000):
        guesser.now_s += 0.01
        guesser.wait_s(f"address {n}")
        guesser.limits.count_valid(f"address {n}")
        guesser.limits.count_unknown(f"guess {n}", f"other address {n}")
    assert len(guesser.limits._clients) <= 4_096
    assert len(guesser.limits._valid) <= 1_000


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.9", None, "203.0.113.9"),
        ("8.8.8.8", "1.1.1.1", "8.8.8.8"),
        ("127.0.0.1", "9.9.9.9, 1.1.1.1", "127.0.0.1 for 1.1.1.1"),
        ("10.0.0.1", "2606:4700::1", "10.0.0.1 for 2606:4700::/64"),
        ("2606:4700::1", None, "2606:4700::/64"),
        ("::ffff:8.8.8.8", "1.1.1.1", "8.8.8.8"),
        ("::ffff:10.0.0.1", "::ffff:1.1.1.1", "::ffff:10.0.0.1 for 1.1.1.1"),
        ("127.0.0.1", "unknown", "127.0.0.1 for unknown"),
        ("127.0.0.1", "", "127.0.0.1"),
    ],
)
def test_an_address_is_that_of_the_client_behind_a_private_proxy(
    peer: str, forwarded: str | None, address: str
) -> None:
    headers = [] if forwarded is None else [(b"x-forwarded-for", forwarded.encode())]
    assert address_of(Request({"type": "http", "client": (peer, 1), "headers": headers})) == address
