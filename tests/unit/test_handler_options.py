"""The options of handlers and stages: editors and type checkers know all of them, from one list."""

import dataclasses
import re
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from mypy import api

import millstream
from millstream import App
from millstream.handlers.handler import Handler, HandlerOptions
from millstream.handlers.stage import Stage, StageOptions

pytestmark = [pytest.mark.worker, pytest.mark.cli]

SOURCE = Path(millstream.__file__).parent
NEVER_GIVEN = {"app", "function", "streams", "arguments", "model", "in_batches", "is_async", "inputs"}
"""What the compiler of a handler or stage finds out by itself."""

NEEDED = ("__init__.py", "app.py", "model.py", "handlers/handler.py", "handlers/stage.py")
"""The modules that a type checker has to see; without the others it takes a second."""

PROGRAM = """
from millstream import App, Message, Retry

app = App("shop")


@app.handler("orders", key=lambda message: message.text("customer", "")[:2], retry=Retry(attempts=2), into="totals")
def right(message: Message) -> None: ...


@app.handler("orders", kye="customer")
def misspelt(message: Message) -> None: ...


@app.handler("orders", rate="5/s")
def of_another_type(message: Message) -> None: ...


@app.stage("orders", nmae="by_hour")
def misspelt_stage(orders: object) -> None: ...


reveal_type(right)
"""


@pytest.mark.parametrize(("made", "options"), [(Handler, HandlerOptions), (Stage, StageOptions)])
def test_the_options_are_the_fields_of_the_handler_or_stage_with_the_same_types(made: type, options: type) -> None:
    fields = typing.get_type_hints(made)
    given = {one.name: fields[one.name] for one in dataclasses.fields(made) if one.name not in NEVER_GIVEN}
    assert typing.get_type_hints(options) == given


@pytest.mark.parametrize(("method", "options"), [(App.handler, HandlerOptions), (App.stage, StageOptions)])
def test_each_option_is_explained_where_editors_show_it(method: Callable[..., object], options: type) -> None:
    explained = set(re.findall(r"`(\w+)`", method.__doc__ or ""))
    assert typing.get_type_hints(options).keys() - explained == set()
    assert typing.get_type_hints(method)["options"] == typing.Unpack[options]


def test_mypy_refuses_an_option_that_is_none_and_keeps_the_type_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "shop.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(SOURCE.parent))
    stdout, problems, code = api.run(
        [
            "--config-file=",
            "--strict",
            "--follow-imports=skip",
            "--explicit-package-bases",
            "--no-error-summary",
            f"--cache-dir={tmp_path}",
            str(program),
            *(str(SOURCE / name) for name in NEEDED),
        ]
    )
    revealed = [line.partition("shop.py:")[2] for line in stdout.splitlines() if line.startswith(str(program))]
    assert [re.sub(r"\s+\[.*", "", line) for line in revealed if "defined in" not in line] == [
        '11: error: Unexpected keyword argument "kye" for "handler" of "App"',
        '15: error: Argument "rate" to "handler" of "App" has incompatible type "str"; expected "float | None"',
        '19: error: Unexpected keyword argument "nmae" for "stage" of "App"',
        '23: note: Revealed type is "def (message: millstream.model.Message)"',
    ], f"{stdout}{problems} ({code})"
