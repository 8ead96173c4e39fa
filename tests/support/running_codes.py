"""What workers and runs report of a handler: its code, and how long its runs take."""

import msgspec

from millstream.delivery.run_times import RunTimes
from millstream.delivery.running_code import RunningCode

CODE = RunningCode(
    engine="workers", version="1.2.3", source="shop.py 0123abcd", settings={"streams": "orders", "key": "n"}
)
CODE_WITH_OUTPUTS = msgspec.structs.replace(
    CODE, settings={**CODE.settings, "key": "key", "into": "out"}, key_field="key"
)
"""Of a handler that is keyed by the field `key`, and writes to `out`."""
RUNS = RunTimes(worker="w-0", over_ms=10_000, committed=42, retried=3, p50_ms=0.25, p99_ms=12.5, longest_ms=2_000)
