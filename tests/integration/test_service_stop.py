"""A service that is told to stop in the moment in which it reports that it serves stops."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from millstream.redis_client.client import Client
from tests.support.waiting import FAIL_SAFE_S

pytestmark = [pytest.mark.master, pytest.mark.router]

PROGRAMS: Mapping[str, str] = {
    "gateway": """
from millstream.services.gateway.auth import Authorizer, new_stream_tokens
from millstream.services.gateway.gateway_process import GatewayOptions, run_gateway

options = GatewayOptions(url=sys.argv[2], authorizer=Authorizer(new_stream_tokens(), ticket_s=60), port=0)
run_gateway(options, on_ready=stop)
""",
    "master": """
from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
from millstream.services.master.scopes import Tokens
from millstream.services.master.master_process import MasterServerOptions, run_master
from millstream.services.master.settings import MasterSettings

options = MasterServerOptions(url=sys.argv[2], port=0, tokens=Tokens(), allow_list=AllowList(LOOPBACK))
run_master(MasterSettings(ticket_stream="tickets", group="workers"), options, on_ready=stop)
""",
}
STOP = """
import os, sys

def stop(*_):
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [2, 15], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("service", PROGRAMS)
def test_a_service_stops_at_a_signal_that_comes_as_it_begins_to_serve(
    client: Client, service: str, number: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOP + PROGRAMS[service], str(number), client.url],
        capture_output=True,
        text=True,
        timeout=FAIL_SAFE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
