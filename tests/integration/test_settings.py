"""Options of commands: the command line counts before the environment, that before the file, that before the default."""

from pathlib import Path

import pytest

from millstream.admin.time_inputs import Duration
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from tests.support.commandline import call

pytestmark = [pytest.mark.cli]


@pytest.fixture
def folder(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; nine entries are in the stream `s`."""
    client.pipeline([("XADD", "s", f"{n}-0", "n", n) for n in range(1, 10)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(client: Client, *options: str) -> int:
    return len(call("tail", "s", "--no-follow", *options, url=client.url).out.splitlines())


def test_a_flag_overrides_the_environment_the_file_and_the_default_in_this_order(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(client) == 9
    (folder / "millstream.toml").write_text("[tail]\nlimit = 4\n")
    assert shown(client) == 4
    (folder / "other.toml").write_text("[tail]\nlimit = 3\n")
    assert shown(client, "--config", "other.toml") == 3
    monkeypatch.setenv("MILLSTREAM_TAIL_LIMIT", "2")
    assert shown(client) == 2
    assert shown(client, "--limit", "1") == 1


def test_subcommands_have_settings_too(client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.execute("XGROUP", "CREATE", "s", "g", "0")
    client.execute("XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">")

    def pending() -> int:
        return len(call("group", "pending", "s", "g", "--json", url=client.url).json_lines())

    (folder / "millstream.toml").write_text("[group.pending]\nlimit = 4\n")
    assert pending() == 4
    monkeypatch.setenv("MILLSTREAM_GROUP_PENDING_LIMIT", "2")
    assert pending() == 2


def test_the_url_of_the_file_applies_to_all_commands(client: Client, folder: Path) -> None:
    (folder / "millstream.toml").write_text(f'url = "{client.url}"\n')
    assert call("tail", "s", "--no-follow").out.count("\n") == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tail]\nlimmit = 4\n", "unknown option 'limmit' in [tail]; did you mean 'limit'?"),
        ("[tail]\nzzz = 4\n", "unknown option 'zzz' in [tail]; use"),
        ("[tial]\nlimit = 4\n", "unknown section 'tial'; did you mean 'tail'?"),
        ("[xyzzy]\nlimit = 4\n", "unknown section 'xyzzy'; use url, or a section with the name of a command"),
        ("[tail\n", "cannot read the file"),
        ("tail = 1\n", "'tail' must be a section: [tail]"),
        ("[dlq.purge]\nyes = true\n", "unknown option 'yes' in [dlq.purge]"),
    ],
)
def test_an_error_in_the_file_is_reported_in_one_line(client: Client, folder: Path, text: str, message: str) -> None:
    (folder / "millstream.toml").write_text(text)
    words = ("dlq", "purge", "--all") if "dlq" in text else ("tail", "s")
    refused = call(*words, url=client.url)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert message in refused.err


def test_a_file_that_does_not_exist_is_named_once(folder: Path) -> None:
    refused = call("tail", "s", "--config", "nofile.toml")
    assert (refused.code, refused.err) == (2, "error: cannot read the file 'nofile.toml': no such file\n")
    refused = call("tail", "s", "--config", str(folder))
    assert refused.err == f"error: cannot read the file '{folder}': Is a directory\n"


def test_a_misspelt_variable_is_a_warning_and_variables_of_other_programs_are_none(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MILLSTREAM_TAIL_LIMT", "MILLSTREAM_REDIS_URL", "MILLSTREAM_ULR", "MILLSTREM_URL"):
        monkeypatch.setenv(name, "2")
    for name in (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "PORT",
        "PORT_6379_TCP_ADDR",
        "TAIL_SERVICE_HOST",
        "WORKER_ALERT_URL",
        "INFO_LIMIT",
        "TEST_X",
    ):
        monkeypatch.setenv(
            f"MILLSTREAM_{name}", "7"
        )  # as Kubernetes does for the services `millstream`, `millstream-tail`
    outcome = call("tail", "s", "--no-follow", url=client.url)
    assert (outcome.code, outcome.out.count("\n")) == (0, 9)
    assert outcome.err == (
        "warning: the environment variable MILLSTREM_URL has no effect; did you mean MILLSTREAM_URL?\n"
        "warning: the environment variable MILLSTREAM_REDIS_URL has no effect; did you mean MILLSTREAM_URL?\n"
        "warning: the environment variable MILLSTREAM_TAIL_LIMT has no effect; did you mean MILLSTREAM_TAIL_LIMIT?\n"
        "warning: the environment variable MILLSTREAM_ULR has no effect; did you mean MILLSTREAM_URL?\n"
    )


def test_an_error_names_the_variable_or_the_file_of_the_value(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "invalid value for '--limit': " in call("tail", "s", "--limit", "x", url=client.url).err
    (folder / "millstream.toml").write_text('[tail]\nlimit = "x"\n')
    assert "invalid value for 'limit' in the configuration file: " in call("tail", "s", url=client.url).err
    monkeypatch.setenv("MILLSTREAM_TAIL_LIMIT", "x")
    assert "for the environment variable MILLSTREAM_TAIL_LIMIT: " in call("tail", "s", url=client.url).err


def test_the_environment_cannot_give_the_consent_of_an_operator(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_DELAYED_CANCEL_YES", "1")
    assert "add --yes" in call("delayed", "cancel", "s", "1-0", url=client.url).err


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [("500ms", 0.5, "500ms"), ("90", 90, "90s"), ("0.3", 0.3, "300ms"), ("5m", 300, "5m"), ("7d", 604_800, "7d")],
)
def test_durations_are_read_and_written_in_one_way(text: str, seconds: float, written: str) -> None:
    found = Duration(text)
    assert float(found) == pytest.approx(seconds)
    assert str(found) == written


@pytest.mark.parametrize("text", ["soon", "-1s", "m", "5 m", "5M", "nan", "inf", ""])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        Duration(text)
