"""Which clients may follow what through `millstream serve`, from which pages, and how many at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from millstream.redis_client.client import Client
from millstream.redis_client.embedded_server import EmbeddedServer
from millstream.services.gateway.auth import Authorizer, new_stream_tokens
from millstream.services.web.errors import Refused
from tests.support.commandline import call
from tests.support.gateways import Server, publish
from tests.support.waiting import FAIL_SAFE_S, eventually

pytestmark = [pytest.mark.router, pytest.mark.xdist_group("serve_access")]

ALL, SOME = "0123456789abcdef-all", "0123456789abcdef-some"
FRIEND = "https://friend.example"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tokens"
    path.write_text(f"{ALL} *  # for the operators\n\n{SOME} entity:* user/[12]\n")
    return path


@pytest.fixture(scope="module")
def server(millstream_server: EmbeddedServer, tokens: Path) -> Iterator[Server]:
    options = ("--token-file", str(tokens), "--connections", "4", "--per-token", "3", "--allow-origin", FRIEND)
    with Server(millstream_server.url, *options) as started:
        yield started


@pytest.fixture
def client(millstream_url: str, server: Server) -> Iterator[Client]:
    eventually(lambda: not server.connections, "the end of other connections")
    with Client(millstream_url) as connected:
        yield connected


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def status(server: Server, stream: str, token: str = "", query: str = "", **headers: str) -> int:
    """How a connection is answered, which is not counted any more when the next one comes."""
    before = server.connections
    with server.follow(
        stream, query=query, **({"authorization": f"Bearer {token}"} if token else {}), **headers
    ) as seen:
        found = seen.status
    eventually(lambda: server.connections <= before, "the end of the connection")
    return found


def ticket(server: Server, token: str, *streams: str) -> httpx.Response:
    return server.http.post("/tickets", json={"streams": streams}, headers=bearer(token))


def closed(open_socket: Callable[[], ClientConnection]) -> tuple[int, str]:
    """With which code and reason a WebSocket is closed."""
    with open_socket() as socket, pytest.raises(ConnectionClosed) as caught:
        socket.recv(FAIL_SAFE_S)
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code, caught.value.rcvd.reason


# --- Starting ---


def test_the_gateway_needs_tokens_to_listen_on_other_interfaces(millstream_url: str, tmp_path: Path) -> None:
    refused = call("serve", "--host", "0.0.0.0", "--port", "0", url=millstream_url)
    assert (refused.code, "--token-file" in refused.err) == (2, True)
    (tmp_path / "empty").write_text("# nobody\n")
    refused = call("serve", "--port", "0", "--token-file", str(tmp_path / "empty"), url=millstream_url)
    assert (refused.code, "--token-file" in refused.err) == (2, True)
    for line in ("tooshort *", ALL):
        (tmp_path / "bad").write_text(f"{line}\n")
        refused = call("serve", "--port", "0", "--token-file", str(tmp_path / "bad"), url=millstream_url)
        assert (refused.code, "bad:1" in refused.err, len(refused.err.splitlines())) == (2, True, 1)


def test_the_gateway_fails_with_an_error_without_redis_or_with_too_few_file_descriptors(millstream_url: str) -> None:
    assert call("serve", "--port", "0", url="redis://127.0.0.1:1").code == 3
    refused = call("serve", "--port", "0", "--connections", "100000000", url=millstream_url)
    assert (refused.code, "--connections" in refused.err) == (2, True)


# --- Tokens and tickets ---


def test_a_token_allows_the_streams_that_its_patterns_name(client: Client, server: Server) -> None:
    assert [status(server, name, ALL) for name in ("entity:1", "user/3")] == [200, 200]
    assert [status(server, name, SOME) for name in ("entity:1", "entity:", "user/1", "user/2")] == [200] * 4
    assert [status(server, name, SOME) for name in ("entity", "my-entity:1", "user/3", "user/12", "Entity:1")] == [
        403
    ] * 5
    assert [status(server, "entity:1", token) for token in ("", "0123456789abcdef-bad", SOME + "x")] == [401] * 3
    answer = server.http.get("/streams?stream=entity:1&stream=other", headers=bearer(SOME))
    assert (answer.status_code, "other" in answer.json()["error"]) == (403, True)


def test_a_ticket_in_a_url_allows_its_streams_and_no_others(client: Client, server: Server) -> None:
    ids = publish(client, "entity:1", range(2))
    found = ticket(server, SOME, "entity:1", "entity:2")
    assert (found.status_code, found.headers["cache-control"]) == (200, "no-store")
    text = found.json()["ticket"]
    assert SOME not in text
    with server.follow("entity:1", query=f"after=0&ticket={text}") as events:
        assert events.ids(2) == ids
    with server.socket("entity:1", f"after=0&ticket={text}") as socket:
        assert ids[0] in str(socket.recv(FAIL_SAFE_S))
    assert status(server, "entity:3", query=f"ticket={text}") == 403
    assert [
        status(server, "entity:1", query=f"ticket={bad}") for bad in (text[:-8] + "AAAAAAAA", "A", "%C3%A9", "")
    ] == [401] * 4
    assert ticket(server, SOME, "other").status_code == 403
    assert ticket(server, "0123456789abcdef-bad", "entity:1").status_code == 401
    assert ticket(server, SOME).status_code == 422
    assert server.http.post("/tickets", content=b"{", headers=bearer(SOME)).status_code == 422
    assert server.http.post("/tickets", content=b" " * 65_537, headers=bearer(SOME)).status_code == 413


def test_a_ticket_expires_and_ends_with_its_token() -> None:
    now = [1_000.0]
    book, other = new_stream_tokens(), new_stream_tokens()
    book.add(SOME, ["entity:*"])
    other.add(ALL, ["*"])
    access = Authorizer(book, ticket_s=60, wall=lambda: now[0])
    text = access.issue_ticket(SOME, ["entity:1"]).text
    holder = access.authorize(["entity:1"], token=SOME, ticket=None)
    now[0] += 59
    assert access.authorize(["entity:1"], token=None, ticket=text) == holder, "they count together"
    with pytest.raises(Refused, match="invalid"):
        Authorizer(other, wall=lambda: now[0]).authorize(["entity:1"], token=None, ticket=text)
    now[0] += 2
    with pytest.raises(Refused, match="expired"):
        access.authorize(["entity:1"], token=None, ticket=text)


def test_a_ticket_ends_with_the_pattern_of_its_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"{SOME} entity:* prices\n")
    book = new_stream_tokens()
    book.read(path)
    access = Authorizer(book)
    text = access.issue_ticket(SOME, ["entity:1", "prices"]).text
    path.write_text(f"{SOME} prices\n")
    access.reload(path)
    with pytest.raises(Refused, match="does not cover the stream 'entity:1'") as refused:
        access.authorize(["entity:1"], token=None, ticket=text)
    assert refused.value.status == 403
    access.authorize(["prices"], token=None, ticket=text)


def test_the_token_file_is_read_again_when_it_changes(client: Client, server: Server, tokens: Path) -> None:
    before, new = tokens.read_text("utf-8"), "0123456789abcdef-new"
    try:
        tokens.write_text(f"{ALL} *\n{new} entity:*\n")
        eventually(lambda: status(server, "entity:1", new) == 200, "the new token")
        assert (status(server, "entity:1", SOME), status(server, "entity:1", ALL)) == (401, 200)
    finally:
        tokens.write_text(before)
    eventually(lambda: status(server, "entity:1", SOME) == 200, "the old tokens")


def test_a_websocket_is_closed_with_the_error_that_http_would_return(client: Client, server: Server) -> None:
    code, reason = closed(lambda: server.socket("entity:1"))
    assert (code, "token" in reason) == (4401, True)
    assert closed(lambda: server.socket("other", additional_headers=bearer(SOME)))[0] == 4403
    assert closed(lambda: server.socket("entity:1", "after=x", additional_headers=bearer(SOME)))[0] == 4400
    code, reason = closed(lambda: server.socket("entity:1", "aftr=0", additional_headers=bearer(SOME)))
    assert (code, reason) == (4400, "unknown parameter 'aftr'; use after, stream, ticket, lastEventId")


def test_a_close_reason_that_is_too_long_for_a_websocket_is_truncated(client: Client, server: Server) -> None:
    name = "entity:" + 100 * "\xe9"
    client.execute("SET", name, "no stream")
    code, reason = closed(lambda: server.socket(name, additional_headers=bearer(SOME)))
    assert (code, len(reason.encode())) == (1011, 123)


# --- Pages ---


def test_pages_of_other_origins_may_use_the_gateway_only_if_they_are_allowed(client: Client, server: Server) -> None:
    for origin in ("https://evil.example", "null", f"{FRIEND}.evil.example"):
        assert status(server, "entity:1", SOME, origin=origin) == 403
        with pytest.raises(InvalidStatus):
            server.socket("entity:1", origin=origin, additional_headers=bearer(SOME))
    own = server.url
    assert status(server, "entity:1", SOME, origin=own) == 200
    with server.follow("entity:1", authorization=f"Bearer {SOME}", origin=FRIEND) as events:
        assert (events.status, events.headers["access-control-allow-origin"]) == (200, FRIEND)
    with server.socket("entity:1", origin=FRIEND, additional_headers=bearer(SOME)) as socket:
        assert "start" in str(socket.recv(FAIL_SAFE_S))
    asked = {
        "Origin": FRIEND,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    answer = server.http.options("/tickets", headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, FRIEND)


def test_a_gateway_without_tokens_answers_to_host_names_of_this_machine_only(millstream_url: str) -> None:
    with Server(millstream_url) as server:
        port = server.url.rpartition(":")[2]
        for host in ("evil.example", f"evil.example:{port}", "[", "127.0.0.1.evil.example"):
            assert server.http.get("/healthz", headers={"Host": host}).status_code == 421, host
        for host in (f"localhost:{port}", "[::1]"):
            assert server.http.get("/healthz", headers={"Host": host}).status_code == 200, host
        assert server.http.post("/tickets", json={"streams": ["s"]}).status_code == 404


def test_a_page_without_an_origin_is_recognised_by_the_fetch_metadata_of_its_browser(
    millstream_url: str, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text("<p>a page</p>")
    with Server(millstream_url, "--page", str(tmp_path)) as server:
        for site in ("cross-site", "same-site"):
            image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
            frame = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
            link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
            found = [server.http.get("/", headers=headers).status_code for headers in (image, frame, link)]
            assert found == [403, 403, 200], site
            assert server.http.get("/streams/s", headers=image).status_code == 403
        for site in ("same-origin", "none"):
            assert server.http.get("/", headers={"Sec-Fetch-Site": site}).status_code == 200


def test_an_allowed_page_may_load_without_an_origin(millstream_url: str) -> None:
    with Server(millstream_url, "--allow-origin", "*") as server:
        assert server.http.get("/healthz", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_hidden_files_of_a_folder_of_pages_are_not_served(millstream_url: str, tmp_path: Path) -> None:
    for name in (".env", ".git/config", "sub/.htpasswd", ".well-known/security.txt", "sub/page.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    with Server(millstream_url, "--page", str(tmp_path)) as server:
        for hidden in (".env", ".git/config", ".git/", "sub/.htpasswd", "%2eenv", "sub/%2E%2e/.env", "%2egit%2fconfig"):
            assert server.http.get(f"/{hidden}").status_code == 404, hidden
        assert [server.http.get(f"/{name}").status_code for name in (".well-known/security.txt", "sub/page.txt")] == [
            200
        ] * 2


# --- Limits ---


def test_the_number_of_connections_is_limited_in_all_and_for_each_token(client: Client, server: Server) -> None:
    text = ticket(server, SOME, "entity:1").json()["ticket"]
    mine = [server.follow("entity:1", authorization=f"Bearer {SOME}") for _ in range(2)]
    mine.append(server.follow("entity:1", query=f"ticket={text}"))
    assert status(server, "entity:1", SOME) == status(server, "entity:1", query=f"ticket={text}") == 429
    assert closed(lambda: server.socket("entity:1", f"ticket={text}"))[0] == 4429
    with server.follow("entity:1", authorization=f"Bearer {ALL}"):
        assert status(server, "entity:1", ALL) == 503
    eventually(lambda: server.connections == 3, "the end of the other token's")
    mine[0].close()
    eventually(lambda: server.connections == 2, "the end of one")
    assert status(server, "entity:1", SOME) == 200
    for events in mine:
        events.close()


def test_a_request_that_is_too_long_is_refused(server: Server) -> None:
    for size, refused in ((17_000, 431), (500_000, 400)):
        assert server.http.get("/healthz", headers={"X": "x" * size}).status_code == refused
    assert server.http.get("/healthz?" + "x" * 17_000).status_code == 431
    assert server.http.get("/healthz").status_code == 200


def test_deeply_nested_json_and_huge_numbers_are_refused_with_one_line(server: Server) -> None:
    deep = b'{"beside":' + 60_000 * b"["
    digits = "9" * 5_000
    found = [
        server.http.post("/tickets", content=deep, headers=bearer(SOME)),
        server.http.get(f"/streams/entity:1?after={digits}", headers=bearer(SOME)),
        server.http.get("/streams/entity:1", headers={**bearer(SOME), "Last-Event-ID": f"{digits}-0"}),
        server.http.get("/streams/entity:1?after=18446744073709551616-0", headers=bearer(SOME)),
        server.http.get("/streams/entity:1?after=1-18446744073709551616", headers=bearer(SOME)),
    ]
    assert [answer.status_code for answer in found] == [422, 400, 400, 400, 400]
    for answer in found:
        assert 0 < len(answer.json()["error"].splitlines()[0]) == len(answer.json()["error"]) < 300
