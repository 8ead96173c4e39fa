"""Which clients may use a master's API, how much of it at once, and where the master itself goes."""

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest

from millstream.errors import MillstreamError
from millstream.redis_client.client import Client
from millstream.services.master.health_checks import HealthChecker, open_transport
from millstream.services.master.health_url_allowlist import LOOPBACK, AllowList
from millstream.services.master.registry import Registry
from millstream.services.master.settings import MasterSettings
from tests.support.commandline import call
from tests.support.masters import GROUP, KEYS, STREAM, TOKEN, HealthPage, Master, MemoConsumer
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.master]

NAMES = ("--ticket-stream", STREAM, "--concurrency-stream-group", GROUP)


def test_a_master_does_not_start_without_a_token_or_with_an_unknown_scope(millstream_url: str, tmp_path: Path) -> None:
    refused = call("master", *NAMES, url=millstream_url)
    assert (refused.code, "--token" in refused.err) == (2, True)
    (tmp_path / "tokens").write_text("0123456789abcdef sing\n")
    refused = call("master", *NAMES, "--token-file", str(tmp_path / "tokens"), url=millstream_url)
    assert (refused.code, "unknown scope" in refused.err) == (2, True)


def test_a_master_with_wrong_settings_fails_with_one_line(millstream_url: str, tmp_path: Path) -> None:
    file = tmp_path / "master.toml"
    file.write_text('[master]\nticket_streem = "x"\n')
    for options in ((), ("--config", str(file)), (*NAMES[:3], "a b", "--insecure-no-token")):
        refused = call("master", *options, url=millstream_url)
        assert refused.code == 2
        assert len(refused.err.splitlines()) == 1, refused.err


def test_a_master_that_cannot_continue_its_rounds_ends_with_an_error(millstream_url: str, client: Client) -> None:
    with Master(millstream_url) as master:
        client.execute("SET", KEYS.meta, "of another type")
        assert master.process.wait(FAIL_SAFE_S) == 1


def test_settings_come_from_a_toml_file(millstream_url: str, tmp_path: Path) -> None:
    file = tmp_path / "master.toml"
    values = {"ticket_stream": STREAM, "concurrency_stream_group": GROUP, "name": "m9", "token": "f" * 20}
    file.write_text("[master]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    with Master(millstream_url, "--config", str(file), token=None, env={}) as master:
        assert master.http.get("/api/health").json()["master"] == "m9"
        found = master.http.get("/api/tickets", headers={"Authorization": f"Bearer {'f' * 20}"})
        assert found.status_code == 200


def test_settings_come_from_the_environment(millstream_url: str) -> None:
    env = {
        "MILLSTREAM_MASTER_TICKET_STREAM": STREAM,
        "MILLSTREAM_MASTER_CONCURRENCY_STREAM_GROUP": GROUP,
        "MILLSTREAM_MASTER_NAME": "m7",
        "MILLSTREAM_MASTER_TOKEN": TOKEN,
    }
    with Master(millstream_url, token=None, env=env) as master:
        assert master.http.get("/api/health").json() == {"status": "ok", "master": "m7", "reasons": []}


def test_a_token_allows_the_calls_of_its_scopes_by_any_host_name_and_no_others(
    millstream_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    file.write_text(
        "# who is who\nconsumers-0123456789 register acknowledge\nlookers-0123456789 read # on\nacks-only-0123456789 acknowledge\n"
    )
    register, acknowledge = {"consumer": "c1"}, {"consumer": "c1", "message_id": "1-1"}
    with (
        Master(millstream_url, "--token-file", str(file)) as master,
        httpx.Client(base_url=master.url, timeout=FAIL_SAFE_S, trust_env=False, verify=False) as http,
    ):

        def status(token: str, method: str, path: str, body: dict[str, str] | None = None) -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return http.request(method, path, json=body, headers=headers).status_code

        for path, body, let_in in (
            ("/api/consumers/register", register, 200),
            ("/api/messages/acknowledge", acknowledge, 404),  # there is no such message
        ):
            assert status("", "POST", path, body) == status("wrong-0123456789abc", "POST", path, body) == 401
            assert status("lookers-0123456789", "POST", path, body) == 403
            assert status("consumers-0123456789", "POST", path, body) == let_in
        assert status("acks-only-0123456789", "POST", "/api/consumers/register", register) == 403
        for path in ("/api/tickets", "/api/consumers", "/metrics"):
            assert status("", "GET", path) == 401
            assert status("consumers-0123456789", "GET", path) == 403
            assert status("lookers-0123456789", "GET", path) == 200
        assert status("", "GET", "/api/health") == status("", "GET", "/openapi.json") == 200
        looker = {"Authorization": "Bearer lookers-0123456789", "Host": "evil.example"}
        assert http.get("/api/tickets", headers=looker).status_code == 200, "with a token no host name is refused"


def test_a_consumer_whose_health_url_fails_is_dead_and_its_name_is_free(millstream_url: str, client: Client) -> None:
    with Master(millstream_url) as master, MemoConsumer(client, "c1").register(master) as first, HealthPage() as other:
        first.health.status = 500
        eventually(lambda: master.state_of("c1") == "dead", "its death")
        assert master.post("consumers/register", consumer="c1", health_url=other.url).status_code == 200


def test_health_urls_outside_of_the_allow_list_are_refused(millstream_url: str) -> None:
    with (
        HealthPage() as page,
        HealthPage() as other,
        Master(millstream_url, "--allow-health", f"127.0.0.1:{page.port}") as master,
    ):
        assert master.post("consumers/register", consumer="c1", health_url=page.url).status_code == 200
        for url in (other.url, "http://10.0.0.1/", "file:///etc/passwd"):
            assert master.post("consumers/register", consumer="c2", health_url=url).status_code in (403, 422)
        eventually(lambda: page.calls, "a ping")
        assert other.calls == 0


def problem(client: Client, allowed: AllowList, url: str, within_s: float = FAIL_SAFE_S) -> str | None:
    """What a master says of a health URL."""
    settings = MasterSettings(ticket_stream=STREAM, group=GROUP)
    pinger = HealthChecker(Registry(client, settings.keys), settings, allowed, on_death=lambda: None)

    async def ask() -> str | None:
        async with open_transport() as transport:
            return (await pinger.call_url(transport, allowed.parse(url), within_s)).problem

    return asyncio.run(ask())


def test_no_redirect_is_followed_and_every_address_of_a_name_is_checked(client: Client) -> None:
    with HealthPage() as page, HealthPage() as secret:
        assert problem(client, AllowList(LOOPBACK), page.url) is None
        named = page.url.replace("127.0.0.1", "localhost")
        assert problem(client, AllowList(LOOPBACK), named) is None
        assert "no address" in (problem(client, AllowList(["10.0.0.0/8"]), named) or "")
        assert "no address" in (problem(client, AllowList(["localhost"]), named) or "")
        page.status, page.location = 302, secret.url
        assert problem(client, AllowList(LOOPBACK), page.url) == "status 302"
        assert secret.calls == 0
        page.status = 500
        assert problem(client, AllowList(LOOPBACK), page.url) == "status 500"


def test_a_health_url_that_never_answers_is_given_up_after_its_time_limit(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert problem(client, AllowList(LOOPBACK), url, within_s=0.1) == "no answer in time"


def test_no_app_may_have_the_name_of_the_masters(tmp_path: Path) -> None:
    from millstream import App

    with pytest.raises(MillstreamError, match="master"):
        App("master")


def test_impossible_ids_and_deeply_nested_json_are_refused_with_one_line(millstream_url: str) -> None:
    with Master(millstream_url) as master:
        for message_id in ("99999999999999999999999999-1", "1-18446744073709551616", "9" * 45):
            for call_name in ("acknowledge", "fail", "release"):
                found = master.post(f"messages/{call_name}", consumer="c1", message_id=message_id)
                assert (found.status_code, "message_id" in found.json()["error"]) == (422, True), found.text
        deep = b'{"consumer":' + 60_000 * b"["
        answer = master.http.post("/api/consumers/register", content=deep, headers={"Content-Type": "application/json"})
        assert (answer.status_code, len(answer.json()["error"].splitlines())) == (422, 1)


def test_a_master_that_an_option_lets_start_without_a_token_answers_to_local_and_allowed_host_names_only(
    millstream_url: str,
) -> None:
    def status(master: Master, host: str, **headers: str) -> int:
        return master.http.get("/api/tickets", headers={"Host": host, **headers}).status_code

    foreign = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", "")
    with Master(millstream_url, "--insecure-no-token", "--allow-host", "desk.example", token=None) as master:
        assert [status(master, host) for host in foreign] == [421] * len(foreign)
        assert [status(master, host) for host in ("localhost:8000", "[::1]:1", "127.0.0.1", "Desk.example:1")] == [
            200
        ] * 4
        assert [status(master, host) for host in ("192.0.2.7", "master")] == [421] * 2
        assert status(master, "localhost", Origin="https://evil.example") == 403
    with Master(millstream_url, "--insecure-no-token", "--host", "0.0.0.0", token=None) as master:
        assert [status(master, host) for host in foreign] == [421] * len(foreign)
        assert [status(master, host) for host in ("192.0.2.7:8000", "[2001:db8::1]:80", "master", "localhost")] == [
            200
        ] * 4
