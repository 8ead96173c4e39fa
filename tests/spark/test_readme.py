"""The PySpark of the README, as it is printed there."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.sources import Bench

pytestmark = [pytest.mark.spark]

README = Path(__file__).parents[2] / "README.md"
WHERE = "redis://127.0.0.1:6379/0"


def test_the_readmes_query_finds_what_is_there_and_writes_it(bench: Bench) -> None:
    (code,) = [text for text in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "readStream" in text]
    assert WHERE in code
    code = code.replace(WHERE, bench.url).replace('"cp"', repr(str(bench.folder / "cp")))
    for carrier, delay in (("UA", 61), ("AA", 59), ("B6", "120.5")):
        bench.client.execute("XADD", "flights", "*", "carrier", carrier, "dep_delay", delay, "other", "x")
    names: dict[str, Any] = {"spark": bench.spark}
    exec(compile(code, str(README), "exec"), names)
    bench.queries.append(names["query"])
    names["query"].processAllAvailable()
    found = bench.client.execute("XRANGE", "delays", "-", "+")
    assert [pairs for _, pairs in found] == [
        [b"carrier", b"UA", b"dep_delay", b"61.0"], [b"carrier", b"B6", b"dep_delay", b"120.5"],
    ]  # fmt: skip
