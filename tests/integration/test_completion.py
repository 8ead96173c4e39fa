"""Completion in a shell: of commands, verbs, options and their values, and quick."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.main import COMMANDS, main
from tests.support.requirements import skip_without

pytestmark = [pytest.mark.cli]

PROGRAM = "from millstream.cli.main import main; main()"
HEAVY = {"pyspark", "pandas", "fastapi", "uvicorn", "httpx", "rich", "opentelemetry.sdk", "matplotlib"}


def asked(line: str, shell: str = "bash") -> dict[str, str]:
    """The environment in which a shell asks for completions of the last word of a line."""
    return {
        "_MILLSTREAM_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": line,
    }


def completed(line: str, *, shell: str = "bash", program: str = PROGRAM) -> list[str]:
    """What a process of `millstream` offers for the last word of a line."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked(line, shell)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("millstream ", [*COMMANDS]),
        ("millstream ke", ["key"]),
        ("millstream key ", ["list", "show", "outputs", "park", "unpark", "skip"]),
        ("millstream key un", ["unpark"]),
        ("millstream info --w", ["--wide", "--watch"]),
        ("millstream worker --log-f", ["--log-format"]),
        ("millstream replay --c", ["--code", "--config"]),
        ("millstream run --start ", ["earliest", "latest"]),
        ("millstream keys ", [*COMMANDS]),  # no command, so it is left out
    ],
)
def test_commands_verbs_options_and_values_are_completed(line: str, offered: list[str]) -> None:
    done = CliRunner().invoke(main, [], env=asked(line), prog_name="millstream", catch_exceptions=False)
    assert (done.stdout.split("\n")[:-1], done.stderr) == (offered, "")


@pytest.mark.parametrize(
    ("line", "more"), [("millstream k", {"redis"}), ("millstream key l", set()), ("millstream run --o", set())]
)
def test_completion_imports_no_slow_modules(line: str, more: set[str]) -> None:
    prelude = "import sys, atexit; atexit.register(lambda: print(*filter(sys.modules.get, sys.modules), sep=chr(10)));"
    imported = set(completed(line, program=f"{prelude} {PROGRAM}"))
    assert "millstream.cli.main" in imported
    assert imported & (HEAVY | more) == set()


def test_help_texts_are_shown_by_shells_that_support_them() -> None:
    (line,) = completed(
        "millstream ke",
        shell="fish",
        program=f"import os; os.environ['_TYPER_COMPLETE_FISH_ACTION'] = 'get-args'; {PROGRAM}",
    )
    assert line.startswith("key\tList the keys that wait")


def test_a_shell_completes_with_the_script_that_install_completion_has_installed(tmp_path: Path) -> None:
    skip_without(shutil.which("bash"), "bash is not on PATH: apt-get install bash")
    program = tmp_path / "bin" / "millstream"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    script = tmp_path / "try.sh"
    script.write_text(
        "millstream --install-completion >&2\n"
        "source ~/.bashrc\n"
        "COMP_WORDS=(millstream dlq re) COMP_CWORD=2\n"
        "$(complete -p millstream | sed -E 's/.*-F ([^ ]+) .*/\\1/') millstream\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "redrive\n", done.stderr
