"""The files of the project that `millstream init` writes."""

from collections.abc import Mapping

_APP = '''"""Orders of a shop: the sum of each customer."""

from dataclasses import dataclass

from millstream import App, Reject, Retry, State

app = App("shop")


@dataclass
class Order:
    """A message of the stream `orders`."""

    customer: str
    amount: float


@dataclass
class Total:
    """A message of the stream `totals`."""

    customer: str
    sum: float


@app.handler("orders", key="customer", retry=Retry(attempts=4), into="totals")
def total(order: Order, state: State) -> Total:
    """Add an order to the sum of its customer. Orders of one customer run in order, those of others beside them."""
    if order.amount < 0:
        raise Reject("an order cannot be negative")  # a dead letter, with this reason
    state["sum"] = state.get("sum", 0) + order.amount  # of this customer; committed with the message
    return Total(order.customer, state["sum"])  # goes to the stream `totals`, exactly once
'''

_TEST = '''"""The handlers of app.py, each run on a message as a worker runs it, without Redis."""

from millstream.testing import run

from app import Total, app, total


def test_an_order_is_added_to_the_sum_of_its_customer() -> None:
    done = run(app, total, {"customer": "ann", "amount": "7"}, state={"sum": 10})
    assert done.outputs_as(Total) == [Total("ann", 17.0)]
    assert done.state == {"sum": 17.0}


def test_a_negative_order_is_a_dead_letter_and_changes_nothing() -> None:
    refused = run(app, total, {"customer": "ann", "amount": "-1"}, state={"sum": 10})
    assert (refused.result, refused.reason) == ("dead-letter", "rejected")
    assert refused.state == {"sum": 10}
'''

_README = """# Shop

`app.py` has the handlers, `test_app.py` their tests, `millstream.toml` the settings of commands that are run in this folder.

Run it: a Redis, a worker, two messages, and what the handler makes of them.

```console
$ millstream dev &                              # a redis-server to try with, its data in .millstream/dev
$ millstream worker app.py:app &                # processes messages until Ctrl-C, or kill
$ millstream publish orders customer=ann amount=10
$ millstream publish orders customer=ann amount=7
$ millstream tail totals --from earliest --limit 2
2026-11-23T09:31:08.370Z  totals  1795426268370-0  customer=ann  sum=10.0
2026-11-23T09:31:08.370Z  totals  1795426268370-1  customer=ann  sum=17.0
```

See what it does, and what has failed:

```console
$ millstream info
$ millstream why shop.total ann
$ millstream dlq list
```

Test it, without Redis:

```console
$ pip install pytest
$ python -m pytest -q test_app.py
```

With a Redis of your own, leave `millstream dev` out: put its URL into `millstream.toml`, or into the environment variable `MILLSTREAM_URL`.
"""

_SETTINGS = """# Options of the commands that are run in this folder, by name: `millstream worker --help` lists those of a worker.
# The command line and the environment (MILLSTREAM_URL, MILLSTREAM_WORKER_PROCESSES) come before this file.
url = "redis://127.0.0.1:6379/0"

[worker]
processes = 1
"""

FILES: Mapping[str, str] = {
    "app.py": _APP,
    "test_app.py": _TEST,
    "README.md": _README,
    "millstream.toml": _SETTINGS,
}
"""The text of each file, by its name."""
