"""The liveness keys of runs on Spark: their end, and a user whose rights do not cover them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millstream.admin.liveness import find_runs, read_epochs
from millstream.delivery.query_progress import QueryProgress, read_progress, report_progress
from millstream.delivery.running_code import read_code, report_code
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import worker_name_key
from millstream.spark.run.liveness import announce_run, begin_run, keep_announced, withdraw_run
from tests.support.running_codes import CODE
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.spark]

KEY = worker_name_key("shop", "spark:minutes")
MINUTES = ("shop", "minutes")


def login(client: Client, *rules: str) -> str:
    """Return the URL of a user with all rights but for these rules."""
    client.execute("ACL", "SETUSER", "limited", "reset", "on", ">secret", "+@all", "~*", *rules)
    return client.url.replace("redis://", "redis://limited:secret@", 1)


@contextmanager
def running(url: str, epoch: int) -> Iterator[list[set[str]]]:
    """Keep a run announced during the block; the list has the names that a newer run has announced."""
    over = threading.Event()
    replaced: list[set[str]] = []
    thread = threading.Thread(
        target=keep_announced,
        args=(url, "shop", lambda: ["minutes"], over),
        kwargs={"epoch": epoch, "progress": dict, "running": {}, "on_replaced": replaced.append},
    )
    thread.start()
    try:
        yield replaced
    finally:
        over.set()
        thread.join(FAIL_SAFE_S)


def report(client: Client, epoch: int) -> None:
    """Report the progress and the code of a handler, as its run does."""
    announce_run(client, "shop", ["minutes"], epoch=epoch)
    report_progress(client, "shop", {"minutes": QueryProgress()})
    report_code(client, "shop", {"minutes": CODE})


def test_a_run_that_ends_removes_what_it_has_reported(client: Client) -> None:
    report(client, epoch=7)
    withdraw_run(client, "shop", ["minutes", "hours"], epoch=7, running={"minutes": CODE})
    assert find_runs(client, [MINUTES]) == set()
    assert read_progress(client, [MINUTES]) == {}
    assert read_code(client, [MINUTES]) == {MINUTES: []}


def test_a_run_that_ends_leaves_the_reports_of_a_newer_run(client: Client) -> None:
    report(client, epoch=7)
    announce_run(client, "shop", ["minutes"], epoch=8)
    withdraw_run(client, "shop", ["minutes"], epoch=7, running={"minutes": CODE})
    assert read_epochs(client, [MINUTES]) == {MINUTES: 8}
    assert read_progress(client, [MINUTES]) == {MINUTES: QueryProgress()}
    assert read_code(client, [MINUTES]) == {MINUTES: [CODE]}


def test_a_run_that_may_not_write_its_liveness_keys_says_what_is_lost_and_still_ends_for_a_newer_run(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    url = login(client, "-set")
    with Client(url) as user:
        epoch = begin_run(user, "shop", ["minutes"])
    assert epoch is not None
    with running(url, epoch) as replaced:
        eventually(lambda: "millstream info does not show" in caplog.text, "the warning")
        assert client.execute("GET", KEY) is None
        begin_run(client, "shop", ["minutes"])
        eventually(lambda: len(replaced) >= 3, "checks after the refusal")
    assert replaced[0] == {"minutes"}
    assert caplog.text.count("liveness keys") == 1
    client.execute("ACL", "DELUSER", "limited")


def test_a_run_that_loses_the_right_to_read_liveness_keys_checks_again_once_it_has_it_back(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    url = login(client)
    with Client(url) as user:
        epoch = begin_run(user, "shop", ["minutes"])
    assert epoch is not None
    login(client, "-get")
    with running(url, epoch) as replaced:
        eventually(lambda: "liveness keys" in caplog.text, "the warning")
        begin_run(client, "shop", ["minutes"])
        login(client)
        eventually(lambda: replaced, "a check")
    client.execute("ACL", "DELUSER", "limited")


def test_a_run_that_may_not_read_liveness_keys_says_so(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with Client(login(client, "-get")) as user:
        assert begin_run(user, "shop", ["minutes"]) is None
    assert "of two runs of a stage the older one may not end" in caplog.text
    client.execute("ACL", "DELUSER", "limited")
