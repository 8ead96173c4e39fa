"""A Redis that refuses the credentials, or gets none: every program says so, at once and in the same words."""

import logging
import re
from pathlib import Path

import pytest

from millstream import App
from millstream.admin.doctor import diagnose
from millstream.balancer import Balancer
from millstream.errors import AccessDenied
from millstream.producer.producer import Producer
from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.redis_client.resp import Command
from millstream.spark.run.early_checks import check_early
from millstream.spark.source.stream_info import fetch
from tests.support.commandline import call

pytestmark = [pytest.mark.cli]

LONG = "x" * 20_000
COMMANDS: dict[str, list[Command]] = {
    "short": [("GET", "a")],
    "many arguments": [("MGET", *map(str, range(20)))],
    "long": [("SET", "a", LONG)],
    "several with many arguments": [("MGET", *map(str, range(20)))] * 3,
}


@pytest.fixture(params=["no password", "a wrong password"])
def refused_url(request: pytest.FixtureRequest, millstream_fresh_server: EmbeddedServer) -> str:
    """The URL of a server that needs another password."""
    millstream_fresh_server.call("CONFIG", "SET", "requirepass", "right")
    url = millstream_fresh_server.url
    return url if request.param == "no password" else url.replace("//", "//:wrong@")


def is_refusal(text: str) -> bool:
    """Whether this is the one sentence about the credentials, and nothing else."""
    return bool(re.fullmatch(r"\S+ refuses the credentials \([^()]*\); check user and password in the URL", text))


@pytest.mark.parametrize("commands", COMMANDS.values(), ids=list(COMMANDS))
def test_whatever_command_comes_first_the_error_names_the_credentials(
    refused_url: str, commands: list[Command]
) -> None:
    with Client(refused_url) as client, pytest.raises(AccessDenied) as caught:
        raise client.pipeline(commands)[0]
    assert caught.value.concerns_credentials
    assert is_refusal(str(caught.value))


def test_a_producer_and_a_balancer_name_the_credentials(refused_url: str) -> None:
    with Producer(refused_url) as producer, pytest.raises(AccessDenied) as of_producer:
        producer.publish("jobs", {"n": 1})
    balancer = Balancer(refused_url, "service", consumer="a")
    with pytest.raises(AccessDenied) as of_balancer:
        balancer.start()
    assert is_refusal(str(of_producer.value))
    assert is_refusal(str(of_balancer.value))


def test_doctor_finds_the_credentials_alone(refused_url: str) -> None:
    with Client(refused_url) as client:
        findings = {one.check: one for one in diagnose(client).findings}
    assert is_refusal(findings["access"].what)
    assert (findings["access"].severity, findings["access"].mend) == ("problem", ())
    assert findings.keys().isdisjoint({"settings", "rights", "data"})
    outcome = call("doctor", url=refused_url)
    assert (outcome.code, "millstream acl" in outcome.out + outcome.err) == (1, False)


def test_a_run_refuses_to_start_before_spark_does(
    refused_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(AccessDenied) as caught:
        check_early(App("shop"), refused_url)
    assert is_refusal(str(caught.value))
    assert caplog.messages == []
    path = tmp_path / f"{tmp_path.name}.py"  # the name of a module that this process has not imported
    path.write_text("from millstream import App\napp = App('shop')\n@app.handler('orders')\ndef pay(message): pass\n")
    outcome = call("run", str(path), "--once", "--checkpoint", str(tmp_path / "cp"), url=refused_url)
    assert outcome.code == 3
    assert is_refusal(outcome.err.strip().removeprefix("error: "))


def test_a_query_on_spark_names_the_credentials_alone(refused_url: str) -> None:
    with Client(refused_url) as client, pytest.raises(AccessDenied) as caught:
        fetch(client, ["orders"])
    assert is_refusal(str(caught.value))
