"""The audit of the console: the names that it has for operators, and the actions that are asked for."""

import re
from pathlib import Path

import pytest

from millstream.admin.audit_log import AuditFilter, AuditLog
from millstream.errors import ConfigError
from millstream.redis_client.client import Client
from millstream.services.console.rights import ConsoleTokens, Level, Viewer
from millstream.services.gateway.auth import new_stream_tokens
from tests.support.commandline import call
from tests.support.consoles import LEVELS, TOKENS, Browser, console, fill_with
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cli]

ROOT = Path(__file__).parents[2]
TOKEN, OTHER = "0123456789abcdef-one", "0123456789abcdef-two"


def read_tokens(folder: Path, text: str) -> ConsoleTokens:
    (folder / "tokens").write_text(text)
    tokens = ConsoleTokens()
    tokens.read(folder / "tokens")
    return tokens


def viewer_of(tokens: ConsoleTokens, token: str) -> Viewer:
    found = tokens.viewer_of(token)
    assert found is not None
    return found[1]


# --- Names in the token file ---


@pytest.mark.parametrize(
    ("words", "name", "level"),
    [
        ("admin name=ann", "ann", Level.ADMIN),
        ("name=ann payloads", "ann", Level.PAYLOADS),
        ("figures operate name=Zoë@example.org # at work", "Zoë@example.org", Level.OPERATE),
        ("payloads name=a=b", "a=b", Level.PAYLOADS),
        (f"figures name={'x' * 64}", "x" * 64, Level.FIGURES),
    ],
)
def test_a_line_of_the_token_file_has_a_name_beside_its_level(
    tmp_path: Path, words: str, name: str, level: Level
) -> None:
    tokens = read_tokens(tmp_path, f"{TOKEN} {words}\n{OTHER} admin name=ann\n")
    assert viewer_of(tokens, TOKEN) == Viewer(name=name, level=level)
    assert viewer_of(tokens, OTHER).name == "ann", "two tokens may have the same name"


def test_a_token_without_a_name_is_called_by_a_hash_that_is_no_token(tmp_path: Path) -> None:
    tokens = read_tokens(tmp_path, f"{TOKEN} admin  # ann\n{OTHER} admin\n")
    names = {viewer_of(tokens, one).name for one in (TOKEN, OTHER)}
    assert len(names) == 2
    assert all(re.fullmatch("token [0-9a-f]{8}", one) for one in names)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([f"{TOKEN} name=ann"], "the token has no level"),
        ([f"{TOKEN} admin name="], "1 to 64 printable characters"),
        ([f"{TOKEN} admin name={'x' * 65}"], "1 to 64 printable characters"),
        ([f"{TOKEN} admin name=a\u202eb"], "1 to 64 printable characters"),
        ([f"{TOKEN} admin name=ann name=bob"], "several names: ann, bob"),
        (
            [f"{OTHER} admin name=ann", f"{TOKEN} figures name=bob", f"{TOKEN} admin name=ann"],
            "several names: ann, bob",
        ),
        ([f"{TOKEN} admin ann"], "a name is written name=ann"),
    ],
)
def test_a_name_that_is_none_is_refused_with_its_line_and_keeps_the_previous_tokens(
    tmp_path: Path, lines: list[str], problem: str
) -> None:
    tokens = read_tokens(tmp_path, f"{OTHER} payloads name=zoe\n")
    (tmp_path / "wrong").write_text("\n".join(["# ours", *lines]))
    with pytest.raises(ConfigError, match=rf"wrong:{len(lines) + 1}: .*{problem}"):
        tokens.replace(tmp_path / "wrong")
    assert viewer_of(tokens, OTHER) == Viewer(name="zoe", level=Level.PAYLOADS)
    assert tokens.find(TOKEN) is None


def test_the_example_of_the_page_is_a_token_file(tmp_path: Path) -> None:
    page = (ROOT / "docs/console.md").read_text()
    lines = [line.strip() for line in page.splitlines() if re.match(r"    [0-9a-f]{32}  ", line)]
    tokens = read_tokens(tmp_path, "\n".join(lines))
    assert [viewer_of(tokens, line.split()[0]).name for line in lines] == ["ann", "ann", "support"]


def test_other_services_have_no_names_in_their_token_files(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN} name=ann\n")
    tokens = new_stream_tokens()
    tokens.read(tmp_path / "tokens")
    assert [scopes for _, scopes in tokens.items()] == [frozenset({"name=ann"})], "a pattern of streams"


# --- The operator of an action ---


def name_tokens(folder: Path, name: str) -> None:
    (folder / "tokens").write_text("".join(f"{TOKENS[one]} {one} name={name}\n" for one in LEVELS))


def test_the_name_of_a_token_is_in_the_head_of_pages_in_the_audit_and_with_what_was_done(
    client: Client, tmp_path: Path
) -> None:
    fill_with(client, "x")
    with console(client.url, tmp_path, "operate") as browser:
        assert "token " in browser.get("/").text
        name_tokens(tmp_path, "eve@example.org")
        eventually(lambda: "eve@example.org: operate" in browser.get("/").text, "the name in a session that is open")
        page = browser.get("/key?handler=shop.pay&stream=orders&key=failing+x")
        assert "by eve@example.org" in browser.send(page, "/key/park").text
        bearer = {"Authorization": f"Bearer {TOKENS['admin']}"}
        assert browser.post("/handler/resume", headers=bearer, name="shop.pay").status == 200
        rows = browser.get("/audit").text
    assert "eve@example.org resume handler shop.pay" in rows
    assert "eve@example.org key park" in rows
    assert [one.by for one in AuditLog(client).read()] == ["eve@example.org", "eve@example.org", "ann"]
    assert "  eve@example.org  key park  " in call("audit", url=client.url).out


# --- The actions that are asked for ---

ACTIONS = (
    ("ann", "pause", {"handler": "shop.pay"}),
    ("ann@admin-1", "key park", {"handler": "shop.pay", "key": "a"}),
    ("bob", "key unpark", {"handler": "shop.ship", "key": "a"}),
    ("bob", "drain", {"worker": "w-0"}),
)


def add_actions(client: Client) -> None:
    for by, action, about in ACTIONS:
        with AuditLog(client).action(by=by, action=action, about=about):
            pass


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [3, 2, 1, 0]),
        ({"by": "ann"}, [1, 0]),
        ({"by": "ann@"}, [1]),
        ({"action": "key"}, [2, 1]),
        ({"action": "key park", "by": "bob"}, []),
        ({"handler": "shop.pay"}, [1, 0]),
        ({"handler": "shop"}, []),
        ({"handler": "shop.pay", "action": "key", "by": "ann"}, [1]),
    ],
)
def test_the_page_and_the_command_show_the_actions_of_an_operator_of_a_kind_and_about_a_handler(
    client: Client, tmp_path: Path, wanted: dict[str, str], found: list[int]
) -> None:
    add_actions(client)
    options = [word for name, text in wanted.items() for word in (f"--{name}", text)]
    told = call("audit", "--json", *options, url=client.url)
    assert [(one["by"], one["action"]) for one in told.json_lines()] == [ACTIONS[n][:2] for n in found]
    said = call("audit", *options, url=client.url)
    assert (said.err, len(said.out.splitlines())) == (
        ("", len(found) + 1) if found else ("there are no such actions\n", 0)
    )
    with console(client.url, tmp_path, "payloads") as browser:
        fields = browser.get("/audit").form("/audit")
        assert fields == {"by": [""], "action": [""], "handler": [""]}
        answer = browser.http.get("/audit", params={**fields, **wanted})
        shown = re.findall(r"<td>([^<]*)</td>\s*<td>([^<]*)</td>", answer.text)
        assert shown == [ACTIONS[n][:2] for n in found]
        assert ("None of these." in answer.text) is not bool(found)
        again = Browser(browser.http).get(str(answer.request.url.raw_path, "ascii")).form("/audit")
        assert again == {name: [wanted.get(name, "")] for name in fields}, "the form has what was asked for"


def test_a_long_audit_is_searched_part_by_part_and_the_page_goes_on_from_there(client: Client) -> None:
    log = AuditLog(client)
    add_actions(client)
    for _ in range(5):
        with log.action(by="bob", action="pause", about={}):
            pass
    wanted = AuditFilter(by="ann")
    found, rest = log.read_page(count=2, wanted=wanted, most_read=5)
    assert (found, rest is None) == ([], False)
    found, rest = log.read_page(count=1, before=rest or "", wanted=wanted)
    assert ([one.action for one in found], rest) == (["key park"], found[0].id)
    found, rest = log.read_page(count=2, before=rest or "", wanted=wanted)
    assert ([one.action for one in found], [one.result for one in found], rest) == (["pause"], ["done"], None)


def test_the_link_to_earlier_actions_keeps_what_was_asked_for(client: Client, tmp_path: Path) -> None:
    for n in range(120):
        with AuditLog(client).action(by="ann" if n % 2 else "bob", action="pause", about={"n": str(n)}):
            pass
    with console(client.url, tmp_path, "payloads") as browser:
        everything = browser.get("/audit")
        (link,) = [one for one in everything.links if "before=" in one]
        assert "by=" not in link
        for n in range(120, 240):
            with AuditLog(client).action(by="ann", action="pause", about={"n": str(n)}):
                pass
        (link,) = [one for one in browser.get("/audit?by=ann").links if "before=" in one]
        earlier = browser.get(link).text
    assert re.findall(r"n (\d+) done", earlier)[0] == "139"
    assert " bob " not in earlier
