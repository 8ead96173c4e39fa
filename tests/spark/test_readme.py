"""The programs for Spark of the README and of pages, as they are printed there, in the one session of these tests."""

import runpy
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.pages import REDIS, blocks_of, write_files
from tests.support.sources import Bench

pytestmark = [pytest.mark.spark]

ORDERS = (("ann", 10.0), ("bob", 5.0), ("ann", 7.0), ("bob", -1.0))


class Program(NamedTuple):
    """A program of a page, the folders that it names, and how often the orders were published before it runs."""

    page: str
    file: str
    folders: tuple[str, ...]
    times: int


PROGRAMS = (
    Program("README.md", "to_parquet.py", ("orders.parquet", "checkpoint"), 2),
    Program("docs/start/spark.md", "to_parquet.py", ("orders.parquet", "checkpoint"), 1),
    Program("docs/start/spark.md", "large_orders.py", ("checkpoint-large",), 1),
    Program("docs/guides/cookbook.md", "archive.py", ("archive", "checkpoint"), 1),
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.page} {program.file}")
def test_the_program_of_a_page_prints_the_output_that_the_page_shows(
    program: Program, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [["customer", name, "amount", str(amount)] for name, amount in ORDERS] * program.times
    bench.add_raw("orders", entries, (f"1795426268370-{n}" for n in range(len(entries))))
    paths = {f'"{name}"': f'"{bench.folder / name}"' for name in program.folders}
    address = bench.url.removeprefix("redis://").partition("/")[0]
    # The JVM of these tests has no MILLSTREAM_URL.
    source = '.readStream.format("redis-streams")'
    given = {source: f'{source}.option("url", "{bench.url}")'}
    files = write_files(program.page, bench.folder, {**paths, REDIS: address, **given})
    runpy.run_path(str(files[program.file]))
    assert output_below(program.page, program.file) in capsys.readouterr().out


def output_below(page: str, file: str) -> str:
    """The block without a language that follows a program of a page."""
    blocks = blocks_of(page)
    at = next(number for number, block in enumerate(blocks) if block.file == file)
    assert not blocks[at + 1].language
    return blocks[at + 1].text


def test_the_programs_are_short_and_complete() -> None:
    for program in PROGRAMS:
        (text,) = [block.text for block in blocks_of(program.page) if block.file == program.file]
        assert len(text.splitlines()) <= 15
        assert "SparkSession.builder" in text
        assert Path(program.file).suffix == ".py"
