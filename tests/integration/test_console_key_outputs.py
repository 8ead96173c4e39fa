"""The page of a key shows the last outputs of its handler for the key, how it finds them, and how far it has searched."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from millstream import App, Message
from millstream.delivery.running_code import RunningCode, code_of, report_code
from millstream.errors import AccessDenied
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import running_code_key
from millstream.services.console import Level
from millstream.services.console.app import RENEWAL_HEADER
from tests.support.command_stats import commands_run
from tests.support.commandline import call
from tests.support.consoles import Page, add_output, authorized, console, fill_with
from tests.support.running_codes import CODE, CODE_WITH_OUTPUTS
from tests.support.waiting import eventually
from tests.support.workers import make, working

pytestmark = [pytest.mark.cli]

KEY = "/key?handler=shop.pay&stream=orders&key=parked+x"
FUNCTION = "The key of shop.pay is not a field of its messages, so its outputs are not looked for."
UNREPORTED = (
    "An earlier version of millstream runs shop.pay and does not report its key, so its outputs are not looked for."
)


def page_with(client: Client, *codes: RunningCode) -> Page:
    """The page of a key, while these versions of its handler run."""
    client.execute("DEL", running_code_key("shop", "pay"))
    for code in codes:
        report_code(client, "shop", {"pay": code}, held_ms=3_600_000)
    with authorized(client.url, Level.PAYLOADS) as browser:
        return browser.get(KEY)


def test_the_outputs_of_the_key_are_shown_the_last_first_with_their_times_and_no_others(
    client: Client, tmp_path: Path
) -> None:
    def handle(message: Message) -> dict[str, str]:
        return {
            "key": message.fields["key"].decode(),
            "n": f"out{message.text('n')}",
            "card": "visa4711",
            "other": "odd",
        }

    handler = make(handle, key="key")
    for n in range(1, 41):
        client.execute("XADD", "in", "*", "n", n, "key", "odd" if n % 2 else "even")
    with working(client, handler):
        eventually(lambda: client.execute("XLEN", "out") == 40, "all outputs")
    report_code(client, "app", code_of([handler], engine="workers", version="1"), held_ms=3_600_000)
    path = "/key?handler=app.handle&key=odd"
    with console(
        client.url, tmp_path, "payloads", redact=lambda name, text: "*" if name == "card" else text
    ) as browser:
        page = browser.get(path)
    of_key = [(entry, fields) for entry, fields in client.execute("XREVRANGE", "out", "+", "-") if fields[1] == b"odd"][
        :10
    ]
    shown = [page.text.index(f"{entry.decode()} 20") for entry, _ in of_key]
    assert (len(shown), shown) == (10, sorted(shown))
    assert page.text.count("key odd n out") == 10
    assert ("key even" in page.text, "visa4711" in page.text, "card *" in page.text) == (False, False, True)
    searched = [entry for entry, _ in client.execute("XREVRANGE", "out", "+", of_key[-1][0])]
    assert f"The last 10 found among the last {len(searched)} of 40 entries of out." in page.text
    assert "An entry counts as an output of the key if its field key is the key, whichever" in page.text
    with console(client.url, tmp_path, "figures") as browser:
        assert browser.get(path).status == 403


def test_the_search_ends_after_a_thousand_entries_or_a_million_bytes_and_says_so(client: Client) -> None:
    fill_with(client, "x")
    assert "None is found among the last 0 of 0 entries of out." in page_with(client, CODE_WITH_OUTPUTS).text
    client.pipeline([("XADD", "out", f"{n}-0", "key", "parked x" if n < 101 else "other") for n in range(1, 1_101)])
    assert "None is found among the last 1,000 of 1,100 entries of out." in page_with(client, CODE_WITH_OUTPUTS).text
    client.execute("XDEL", "out", "1100-0")
    page = page_with(client, CODE_WITH_OUTPUTS)
    assert "The last 1 found among the last 1,000 of 1,099 entries of out." in page.text
    assert "100-0 1970-01-01T00:00:00.100Z key parked x" in page.text
    client.execute("DEL", "out")
    client.pipeline([("XADD", "out", "*", "key", "other", "n", b"x" * 400_000) for _ in range(40)])
    assert "None is found among the last 5 of 40 entries of out." in page_with(client, CODE_WITH_OUTPUTS).text


def test_a_page_without_the_settings_that_it_finds_outputs_by_gives_the_reason(client: Client) -> None:
    fill_with(client, "x")
    client.execute("XADD", "out", "*", "key", "parked x")
    assert "No worker and no run reports the settings of shop.pay now, so its output" in page_with(client).text
    assert "shop.pay has no into=, so it writes no outputs." in page_with(client, CODE).text
    app = App("shop")

    def key(message: Message) -> bytes:
        return message.fields["key"]

    @app.handler("orders", key=key, into="out")
    def pay(message: Message) -> None:
        """A handler with a key function that has the name of a field."""

    (by_function,) = code_of(app.handlers.values(), engine="spark", version="1").values()
    page = page_with(client, by_function)
    assert (FUNCTION in page.text, UNREPORTED in page.text, "entries of out" in page.text) == (True, False, False)


def test_a_report_of_an_earlier_version_without_the_key_is_not_said_to_be_of_a_handler_without_one(
    client: Client,
) -> None:
    fill_with(client, "x")
    report = msgspec.json.decode(msgspec.json.encode(CODE_WITH_OUTPUTS))
    del report["key_field"]
    page = page_with(client, msgspec.convert(report, RunningCode))
    assert (FUNCTION in page.text, UNREPORTED in page.text, "entries of out" in page.text) == (False, True, False)


def test_an_open_page_does_not_search_again_when_it_renews_itself(client: Client) -> None:
    fill_with(client, "x")
    add_output(client, "x")
    with authorized(client.url, Level.PAYLOADS) as browser:
        reads = [commands_run(client.execute)["xrevrange"]]
        assert "The last 1 found among the last 1 of 1 entries of out." in browser.get(KEY).text
        reads.append(commands_run(client.execute)["xrevrange"])
        page = browser.get(KEY, **{RENEWAL_HEADER: "1"})
        reads.append(commands_run(client.execute)["xrevrange"])
    assert reads[2] - reads[1] < reads[1] - reads[0]
    assert ("Key parked x of shop.pay on orders waits" in page.text, "Last outputs" in page.text) == (True, False)


def test_the_streams_of_all_versions_that_run_are_searched(client: Client) -> None:
    fill_with(client, "x")
    client.execute("XADD", "out", "*", "key", "parked x")
    client.execute("XADD", b"bills \xff", "*", b"id\xfe", "parked x")
    settings = {"into": r"bills\x20\xff"}
    other = msgspec.structs.replace(CODE, settings=settings, key_field=r"id\xfe")
    page = page_with(client, CODE_WITH_OUTPUTS, other, CODE)
    assert "The last 1 found among the last 1 of 1 entries of out." in page.text
    assert r"The last 1 found among the last 1 of 1 entries of bills \xff." in page.text
    assert r"if its field id\xfe is the key" in page.text
    assert "has no into=" not in page.text


def test_an_output_stream_that_cannot_be_read_is_a_sentence_beside_the_rest_of_the_page(client: Client) -> None:
    fill_with(client, "x")
    client.execute("XADD", "out", "*", "key", "parked x")
    report_code(client, "shop", {"pay": CODE_WITH_OUTPUTS}, held_ms=3_600_000)
    url = f"redis://viewer:secret@{urlsplit(client.url).netloc.rpartition('@')[2]}"
    for options, is_read in (((), False), (("--into", "out"), True)):
        rule = call("acl", "console", "--user", "viewer", "--stream", "orders", *options).out
        client.execute(*rule.split(), ">secret")
        with Client(url) as viewer, pytest.raises(AccessDenied):
            viewer.execute("XADD", "out", "*", "key", "of a viewer")
        with authorized(url, Level.PAYLOADS) as browser:
            page = browser.get(KEY)
        assert page.status == 200
        assert ("The output stream out cannot be read: the Redis user may not" in page.text) is not is_read
        assert ("The last 1 found among the last 1 of 1 entries of out." in page.text) is is_read
        assert "Key parked x of shop.pay on orders waits: parked for" in page.text
    client.execute("DEL", "out")
    client.execute("SET", "out", "of another program")
    page = page_with(client, CODE_WITH_OUTPUTS)
    assert re.search("The output stream out cannot be read: [A-Z]+ out: the key holds another type", page.text)
