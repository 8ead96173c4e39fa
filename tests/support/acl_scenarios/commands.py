"""Every command of `millstream`, for the tests of access rights."""

from pathlib import Path

from millstream import App, Message
from millstream.admin.key_queues import list_queues, park, read_queues, skip, unpark
from millstream.delivery.redrive_reports import RedriveReport, report_redrive
from millstream.errors import AccessDenied
from millstream.partitions.partitions import Partitions
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, worker_name_key
from tests.support.acl_scenarios.lease import oversee
from tests.support.acl_scenarios.worker import KEYS, add, keyed, lease_one, letter, reliable
from tests.support.commandline import call
from tests.support.partition_fixtures import BASE, Worker

WITHOUT_THEIR_RIGHTS = {"settings", "rights"}
"""Checks of `doctor` that need rights which no role has, as the page on access control says."""

checked_app = App("shop")


@checked_app.handler("orders", name="bill")
def bill(message: Message) -> None:
    """For `check`, which runs the handlers of an app."""


@checked_app.handler("orders", key="n")
def by_number(message: Message) -> None:
    """For `replay`, which runs a handler with a key."""


def command(url: str, *words: str) -> None:
    """Run a command of millstream; raise its error if access is denied, or if it may not record what it does."""
    outcome = call(*words, url=url)
    if outcome.code == 3 or "is not recorded in the audit" in outcome.err:
        raise AccessDenied(outcome.err)
    assert outcome.code == 0, outcome.err


def examine(url: str) -> None:
    """Run `doctor`; raise AccessDenied if it leaves out a check that an operator may make."""
    for one in call("doctor", "--json", url=url).json()["findings"]:
        if not one["is_checked"] and one["check"] not in WITHOUT_THEIR_RIGHTS:
            raise AccessDenied(one["what"])


def operate(url: str, admin: Client) -> None:
    """Every command for inspection and repair."""
    add(admin, 5)
    stream = reliable(admin)
    stream.join()
    found = stream.fetch(count=4)
    stream.dead_letter(*((one, letter()) for one in found[:3]))
    stream.checkpoint()
    admin.execute("HSET", KEYS.state, "A", b"\x80")
    examine(url)
    command(url, "check", f"{__name__}:checked_app", "--yes")
    command(url, "dlq", "show", letters_of(admin)[0])
    command(url, "dlq", "edit", "shop", letters_of(admin)[0], "--set", "n=1", "--by", "1", "--yes")
    for words in ("info", "dlq list", "dlq groups", "dlq redrive shop --limit 1 --yes", "dlq purge --all --yes"):
        command(url, *words.split())
    for words in ("list", "show", "reset --dry-run", "reset --yes"):
        keys = [] if words == "list" else ["A"]
        command(url, "state", *words.split(), "shop.bill", "--stream", "orders", *keys)
        command(url, "state", "export", "shop.bill")
    report_redrive(admin, "shop", "bill", RedriveReport(id="1-0", by="ann", rate=1, began_ms=1, letters=2))
    command(url, "dlq", "stop", "shop.bill", "1-0")
    command(url, "pause", "shop.bill")
    command(url, "resume", "shop.bill")
    command(url, "rate", "set", "shop.bill", "60/m")
    command(url, "rate", "show", "shop.bill")
    command(url, "rate", "clear", "shop.bill")
    admin.execute("SET", worker_name_key("shop", "w-0"), "token")
    command(url, "drain", "w-0", "--yes")
    operate_queues(url, admin)
    oversee(command, url, admin)
    Worker(admin, app="shop", handler="bill")
    operate_partitions(url)
    operate_delayed(url, admin)
    command(url, "group", "list", "--pattern", "orders*")
    command(url, "group", "create", "orders", "g", "--after", "earliest")
    command(url, "group", "set-id", "orders", "g", "--after", "earliest", "--yes")
    for name, number in (("a", 2), ("b", 1)):
        admin.execute("XREADGROUP", "GROUP", "g", name, "COUNT", number, "STREAMS", "orders", ">")
    command(url, "group", "consumers", "orders", "g")
    command(url, "group", "pending", "orders", "g")
    command(url, "group", "claim", "orders", "g", "b", found[0].id.decode())
    command(url, "group", "claim", "orders", "g", "b", "--min-idle", "0s", "--yes")
    admin.execute("XCLAIM", "orders", "g", "a", 0, found[0].id)
    command(url, "group", "delete-consumer", "orders", "g", "a", "--transfer-to", "b", "--yes")
    command(url, "group", "clean", "orders", "--idle", "1h", "--yes")
    command(url, "group", "delete", "orders", "g", "--yes")
    gone = HandlerKeys("shop", "gone", "orders")
    admin.execute("HSET", gone.meta, "committed_id", "0-0")
    command(url, "forget", "shop.gone", "--yes")
    assert not admin.execute("EXISTS", gone.meta)
    command(url, "audit")
    command(url, "history")
    command(url, "tail", "orders", "--no-follow")
    command(url, "tail", "orders", "--from", "earliest", "--limit", "1")
    # Last, as it starts a process: most rights that an operator lacks are refused before.
    command(url, "replay", f"{__name__}:checked_app", "by_number", "1", "--yes")


def letters_of(admin: Client) -> list[str]:
    return [one.decode() for one, _ in admin.execute("XREVRANGE", KEYS.dead_letters, "+", "-")]


def operate_delayed(url: str, admin: Client) -> None:
    with Producer(admin) as producer:
        later = producer.publish("orders", {"n": b"1"}, delay_ms=3_600_000)
    command(url, "delayed", "list", "orders")
    command(url, "delayed", "cancel", "orders", later, "--dry-run")
    command(url, "delayed", "cancel", "orders", later, "--yes")


def operate_partitions(url: str) -> None:
    command(url, "partition", "create", BASE, "2")
    with Client(url) as client:
        layout = Partitions(client, BASE).require()
    command(url, "partition", "grow", BASE, str(layout.count + 1), "--yes")
    command(url, "partition", "show", BASE)


def operate_queues(url: str, admin: Client) -> None:
    """The commands for the keys of a handler, for a key in progress and for others."""
    stream = keyed(admin)
    stream.join()
    stream.enqueue_new(count=100, max_pending=100)
    queue = next(name for name in admin.execute("LRANGE", KEYS.ready, 0, -1) if name.startswith(b"k"))
    key = queue[1:].decode()
    for words in (
        "list",
        "list shop.bill",
        f"show shop.bill {key}",
        f"outputs shop.bill {key}",
        f"park shop.bill {key}",
        f"unpark shop.bill {key}",
    ):
        command(url, "key", *words.split())
    command(url, "key", "park", "shop.bill", key)
    command(url, "why", "shop.bill", key)
    command(url, "find", key)
    command(url, "find", "1-1")
    command(url, "top", "--interval", "100ms")
    command(url, "key", "unpark", "shop.bill", "--all", "--yes")
    admin.execute("LREM", KEYS.ready, 1, queue)
    admin.execute("LPUSH", KEYS.ready, queue)
    admin.execute("DEL", KEYS.notify)
    with Client(url) as client:
        assert park(client, KEYS, queue, "why")
        assert unpark(client, KEYS, queue)
        assert lease_one(stream).queue == queue
        admin.execute("RPUSH", KEYS.queue(queue), "99999999999999-0")
        assert skip(client, KEYS, queue, error="by hand") is not None
        assert list_queues(client, KEYS)
        assert read_queues(client, KEYS, [queue])
    admin.execute("RPUSH", KEYS.queue(b"kskipped"), add(admin, 1)[0])
    command(url, "key", "skip", "shop.bill", "skipped", "--yes")


def publish(url: str, folder: Path) -> None:
    file = folder / "rows.csv"
    file.write_text("n\n1\n2\n")
    command(url, "publish", "orders", str(file), "--wait", "0")
