"""Sends a note for each order: an async handler without a key, for `millstream worker` (and `millstream run`)."""

import asyncio

from millstream import App, Message, Reject, Retry

app = App("notify")


@app.handler("orders", retry=Retry(attempts=5, delay_ms=200), into="notes", concurrency=50, time_limit_ms=10_000)
async def note(message: Message) -> dict[str, str]:
    """Notify the customer; 50 orders at a time, with retries if the mail server does not answer."""
    customer = message.text("customer")
    if not customer:
        raise Reject("the order has no customer")
    await asyncio.sleep(0.01)  # stands for the mail server
    return {"customer": customer, "order": message.id}
