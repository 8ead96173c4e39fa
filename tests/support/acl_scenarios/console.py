"""Every page and every form of the console."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from millstream.admin.audit_log import AuditLog
from millstream.balancer import announce
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import AccessDenied
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import history_writer_key
from millstream.services.console import Level
from millstream.services.console.history_writer import HistoryWriter
from tests.support.console_forms import FORMS
from tests.support.consoles import Browser, Page, add_output, authorized, console, fill_with, pages_one_by_one
from tests.support.dead_letters import KEYS as DEAD_LETTER_KEYS
from tests.support.dead_letters import add_dead_letter
from tests.support.waiting import eventually

KEY = "/key?handler=shop.pay&stream=orders&key=parked+x"


def manage(url: str, admin: Client) -> None:
    """Look at every page, and send every form."""
    keyed = fill_with(admin, "x")
    for n in range(4):
        admin.execute("XADD", "orders", f"{1_900_000_000_000 + n}-0", "key", "x", "text", "x")
    admin.execute("XDEL", "orders", "1900000000001-0")
    announce(admin, "calls", "orders")
    Group(admin, "orders", "readers").create()
    with Client(url) as client:
        client.execute("PING")  # as at the start of the process
        check_no_output(client)
    write_history(url, admin)
    with authorized(url, Level.ADMIN) as browser:
        for _, page in pages_one_by_one(browser, "/", "/workers?service=calls"):
            granted(page)
        for text in ("parked x", "nothing", "1-1"):
            granted(browser.get(f"/find?q={text}"))
        check_findings(browser)
        check_outputs(browser, admin)
        act(browser, keyed, admin)
        redrive_at_a_rate(browser, admin)
    with TemporaryDirectory() as folder, console(url, Path(folder)) as browser:
        granted(browser.send(granted(browser.log_in("figures")), "/logout"))


def write_history(url: str, admin: Client) -> None:
    """Add to the history once another console, which held the name for too long, has released it."""
    admin.execute("SET", history_writer_key(), "another", "PX", 3_600_000)
    writer = HistoryWriter(url)
    assert not writer.write()
    admin.execute("DEL", history_writer_key())
    assert writer.write()
    writer.release()


def granted(page: Page) -> Page:
    """The page. Raises AccessDenied if Redis has refused something."""
    if page.status != 200:
        raise AccessDenied(page.text)
    return page


def check_findings(browser: Browser) -> None:
    """Raise AccessDenied if the page on Redis leaves out a check that the console may make; no role has CONFIG GET."""
    for sentence in granted(browser.get("/redis")).text.split("warning "):
        name, _, text = sentence.partition(": ")
        if text.startswith("not checked") and name != "rights" and "CONFIG GET" not in text:
            raise AccessDenied(text)


def check_outputs(browser: Browser, admin: Client) -> None:
    """Raise AccessDenied if the page of a key does not show its outputs."""
    add_output(admin, "x")
    page = granted(browser.get(KEY))
    if "cannot be read" in page.text:
        raise AccessDenied(page.text)
    assert "The last 1 found among the last 1 of 1 entries of out" in page.text


def check_no_output(client: Client) -> None:
    """Check that the console, which reads outputs, may write none."""
    for command in (("XADD", "out", "*", "key", "x"), ("XDEL", "out", "1-1"), ("XGROUP", "SETID", "out", "g", "0")):
        with pytest.raises(AccessDenied):
            client.execute(*command)


def act(browser: Browser, keyed: KeyedStream, admin: Client) -> None:
    """Send every form; those that ask are answered."""
    send(browser, "/handler/resume", "/handler/pause", "/handler/rate", "/handler/rate/clear", "/stuck/unpark")
    (lease,) = keyed.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    assert lease.key == b"parked x"
    send(browser, "/key/skip", "/key/park", "/key/reset", "/letters/export", "/letter/edit")
    assert admin.execute("UNLINK", DEAD_LETTER_KEYS.resent) == 1  # the edited copy is under way no more
    granted(browser.send(granted(browser.get(KEY)), "/key/park"))
    send(browser, "/key/unpark", "/key/skip", "/letters/redrive", "/letters/redrive/stop")
    send(browser, "/key/skip", "/letters/purge")
    send(browser, "/delayed/cancel", "/workers/drain", "/group/set-id")


def redrive_at_a_rate(browser: Browser, admin: Client) -> None:
    """Redrive a dead letter at a rate; raise AccessDenied if Redis has refused something to the thread that does it."""
    add_dead_letter(admin, [b"n", b"1"])
    question = browser.send(granted(browser.get("/letters?handler=shop.pay")), "/letters/redrive")
    granted(browser.send(granted(question), "/letters/redrive", rate="5"))
    result = eventually(lambda: AuditLog(admin).read(count=1)[0].result, "the redrive to end")
    if result != "1 of 1 redriven":
        raise AccessDenied(str(result))


def send(browser: Browser, *paths: str) -> None:
    """Send the forms that go to these paths."""
    for path in paths:
        granted(FORMS[path].send(browser, path))
