"""Stages of an app: what is wrong with one is said when the app is loaded, and loading needs no Spark."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream import App, Message, Rows, load_app
from millstream.errors import ConfigError
from millstream.spark.run.app_archive import loaded_modules, pack
from millstream.spark.source.schema import schema_of
from millstream.worker.process.worker_process import WorkerProcess, WorkerSettings

pytestmark = [pytest.mark.spark]

APP = """
from millstream import App, Rows

app = App("only_stages")

@app.stage(Rows("orders", "n int"), into="copies")
def copy(orders: "DataFrame") -> "DataFrame":
    from pyspark.sql import functions
    return orders
"""


@dataclass
class Order:
    """A model."""

    customer: str
    amount: float
    count: int | None = None


def one(rows: Any) -> Any:
    """A stage of one input."""


def two(left: Any, right: Any) -> Any:
    """A stage of two inputs."""


async def never(rows: Any) -> Any:
    """A stage cannot be async."""


async def yields(rows: Any) -> Any:
    """Nor can it yield."""
    yield rows


def handle(message: Message) -> None:
    """A handler without outputs."""


@pytest.mark.parametrize(
    ("inputs", "options", "function", "reason"),
    [
        ((), {}, one, "needs an input"),
        (("orders",), {"in_to": "x"}, one, "unknown option 'in_to'; did you mean 'into'"),
        (("orders",), {"into": ""}, one, "into must be the name of a stream"),
        (("orders",), {"into": "orders"}, one, "would read its own output"),
        ((Rows(pattern="orders:*"),), {"into": "orders:all"}, one, "would read its own output"),
        (("orders", "orders"), {}, two, "a stream is named twice; name it once"),
        (("orders", "payments"), {}, one, "has 2 inputs: give it a parameter for the DataFrame of each"),
        (("orders",), {}, two, "has 1 input"),
        (("orders",), {}, never, "must be a plain function"),
        (("orders",), {}, yields, "must be a plain function"),
        ((Rows("orders", pattern="o*"),), {}, one, "each input is a stream's name, or Rows"),
        ((Rows(),), {}, one, "each input is a stream's name, or Rows"),
        ((7,), {}, one, "each input is a stream's name, or Rows"),
        ((" orders",), {}, one, "must not contain a comma nor begin or end with a space"),
        ((Rows("orders", options={"subscribe": "x"}),), {}, one, "the run sets the option subscribe of its rows"),
        ((Rows("orders", int),), {}, one, "stage 'one': the schema of orders: int is not a model"),
        ((Rows(one),), {}, one, "'one' is not a handler of this app"),
        ((Rows(handle),), {}, one, "the handler 'handle' has no output stream"),
        (("orders",), {"name": "handle"}, one, "two handlers or stages named 'handle'"),
        (("orders",), {"name": "a b"}, one, "stage name 'a b'"),
    ],
)
def test_a_mistake_in_a_stage_is_reported_in_one_line(
    inputs: tuple[Any, ...], options: dict[str, Any], function: Callable[..., Any], reason: str
) -> None:
    app = App("app")
    app.handler("in")(handle)
    with pytest.raises(ConfigError) as refused:
        app.stage(*inputs, **options)(function)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_decorator_without_its_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'write @app\.stage\("orders"\)'):
        App("app").stage(one)


def test_a_stage_reads_streams_or_the_outputs_of_a_handler() -> None:
    app = App("app")
    app.handler("in", into="out")(handle)
    app.stage(handle, Rows(["a", "b"], Order), into="c")(two)
    stage = app.stages["two"]
    assert [given.streams for given in stage.inputs] == [("out",), ("a", "b")]
    assert (stage.label, stage.into) == ("app.two", "c")


def test_a_part_of_an_app_is_chosen_by_name() -> None:
    app = App("app")
    app.handler("in", into="out")(handle)
    app.stage("out", into="c")(one)
    assert (list(app.only(["one"]).handlers), list(app.only(["one"]).stages)) == ([], ["one"])
    assert (list(app.only([]).handlers), list(app.only([]).stages)) == (["handle"], ["one"])
    with pytest.raises(ConfigError, match="no handler or stage 'two'; it has handle, one"):
        app.only(["two"])


def test_a_schema_has_the_columns_of_the_model_and_of_the_entry() -> None:
    schema = schema_of(Order)
    assert not isinstance(schema, str)
    assert schema.simpleString() == (
        "struct<customer:string,amount:double,count:bigint,_stream:string,_id:string,_timestamp:timestamp>"
    )


def test_an_app_of_stages_loads_without_pyspark_and_workers_refuse_it(tmp_path: Path) -> None:
    path = tmp_path / "app_of_stages_only.py"
    path.write_text(APP)
    code = f"import sys; sys.modules['pyspark'] = None\nfrom millstream import load_app\nprint(*load_app({str(path)!r}).stages)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "copy\n"
    with pytest.raises(ConfigError, match="only stages, which need Spark: use millstream run"):
        WorkerProcess(load_app(str(path)), WorkerSettings(url="redis://127.0.0.1:1/0", consumer="me"))


def test_an_app_is_packed_with_the_modules_that_it_imported_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "package_of_this_test" / "inner"
    inside.mkdir(parents=True)
    (inside / "data.txt").write_text("data")
    (inside / "used.py").write_text("")
    (inside.parent / "later.py").write_text("value = 7\n")
    (tmp_path / "unrelated_of_this_test.py").write_text("")
    (tmp_path / "packed_app_of_this_test.py").write_text(
        "import package_of_this_test.inner.used\nfrom millstream import App\napp = App('app')\n"
        "@app.stage('in', into='out')\ndef stage(rows): ...\n"
    )
    load_app(str(tmp_path / "packed_app_of_this_test.py"))
    (tmp_path / "packed_app_of_this_test").mkdir()  # data, which Python does not take for a package beside the module
    found = loaded_modules(tmp_path)
    assert [path.name for path in found] == ["package_of_this_test", "packed_app_of_this_test.py"]
    pack(found, tmp_path / "app.zip")
    code = (
        "import package_of_this_test.later as later, packed_app_of_this_test as app; print(later.value, app.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        env={"PYTHONPATH": _path(tmp_path)},
    )
    assert done.stdout.startswith(f"7 {tmp_path}/app.zip/")
    monkeypatch.chdir(tmp_path)
    twin = tmp_path / "twin" / "packed_app_of_this_test.py"
    twin.parent.mkdir()
    twin.write_text("")
    with pytest.raises(ConfigError, match="would be the same module"):
        pack([*found, twin], tmp_path / "twins.zip")


def _path(folder: Path) -> str:
    import millstream

    return f"{folder}/app.zip:{Path(millstream.__file__).parents[1]}"
