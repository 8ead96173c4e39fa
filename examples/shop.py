"""The smallest useful app: a running total per customer. Try it as in docs/start/workers.md."""

from dataclasses import dataclass

from millstream import App, Reject, Retry, State

app = App("shop")


@dataclass
class Order:
    """One order, an entry of the stream."""

    customer: str
    amount: float


@app.handler("orders", key="customer", retry=Retry(attempts=4), into="totals")
def total(order: Order, state: State) -> dict[str, object]:
    """Add an order to its customer's total."""
    if order.amount < 0:
        raise Reject("an order cannot be negative")
    state["sum"] = state.get("sum", 0) + order.amount
    return {"customer": order.customer, "sum": state["sum"]}
