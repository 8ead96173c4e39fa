"""Every page and every form of the console."""

from pathlib import Path
from tempfile import TemporaryDirectory

from millstream.balancer import announce
from millstream.delivery.keyed_stream import KeyedStream
from millstream.errors import AccessDenied
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import history_writer_key
from millstream.services.console import Level
from millstream.services.console.history_writer import HistoryWriter
from tests.support.acl_scenarios.commands import WITHOUT_THEIR_RIGHTS
from tests.support.consoles import Browser, Page, authorized, console, fill_with, pages_one_by_one

KEY = "/key?handler=shop.pay&stream=orders&key=parked+x"
LETTERS = "/letters?handler=shop.pay"


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
    write_history(url, admin)
    with authorized(url, Level.ADMIN) as browser:
        for _, page in pages_one_by_one(browser, "/", "/workers?service=calls"):
            granted(page)
        for text in ("parked x", "nothing", "1-1"):
            granted(browser.get(f"/find?q={text}"))
        check_findings(browser)
        act(browser, keyed)
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
    """Raise AccessDenied if the page on Redis leaves out a check that the console may make."""
    for sentence in granted(browser.get("/redis")).text.split("warning "):
        name, _, text = sentence.partition(": ")
        if text.startswith("not checked") and name not in WITHOUT_THEIR_RIGHTS:
            raise AccessDenied(text)


def act(browser: Browser, keyed: KeyedStream) -> None:
    """Send every form; those that ask are answered."""
    send(browser, "/handler?name=shop.pay", "/handler/resume")
    send(browser, "/handler?name=shop.pay", "/handler/pause")
    send(browser, "/handler?name=shop.pay", "/handler/rate", rate="60/m")
    send(browser, "/handler?name=shop.pay", "/handler/rate/clear")
    form = granted(browser.get("/stuck")).form("/stuck/unpark")
    granted(browser.post("/stuck/unpark", **form, stuck="handler=shop.pay&stream=orders&key=parked+x"))
    (lease,) = keyed.lease_keys(queues=1, entries=1, run=1, lease_ms=60_000, now_ms=0).leases
    assert lease.key == b"parked x"
    for path in ("/key/skip", "/key/park", "/key/reset"):
        send(browser, KEY, path)
    send(browser, LETTERS, "/letters/export")
    letter = next(one for one in granted(browser.get(LETTERS)).links if one.startswith("/letter?"))
    edit = next(one for one in granted(browser.get(letter)).links if one.startswith("/letter/edit"))
    send(browser, edit, "/letter/edit", name0="n", value0="1")
    send(browser, KEY, "/key/skip")
    send(browser, LETTERS, "/letters/redrive")
    send(browser, KEY, "/key/skip")
    question = granted(browser.send(granted(browser.get(LETTERS)), "/letters/purge"))
    granted(browser.send(question, "/letters/purge", confirm="1"))
    send(browser, "/delayed?stream=orders", "/delayed/cancel")
    token = granted(browser.get("/handler?name=shop.pay")).form("/handler/resume")["form_token"]
    question = granted(browser.post("/workers/drain", app="shop", worker="w-0", form_token=token))
    granted(browser.send(question, "/workers/drain", confirm="w-0"))
    send(browser, "/group?stream=orders&group=readers", "/group/set-id", after="2023-11-15T00:00")


def send(browser: Browser, page: str, path: str, **fields: str) -> None:
    """Send the form of a page that goes to `path`, and answer its question if it asks one."""
    answer = granted(browser.send(granted(browser.get(page)), path, **fields))
    if "Yes, do it" in answer.text:
        granted(browser.send(answer, path))
