"""Code of a handler, as workers and runs report it."""

from millstream.delivery.running_code import RunningCode

CODE = RunningCode(
    engine="workers", version="1.2.3", source="shop.py 0123abcd", settings={"streams": "orders", "key": "n"}
)
