"""Each form of the console once: its page, what it is filled in with, its record, and the command with the same effect."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.delivery.delayed_messages import DelayedMessages
from millstream.groups import Group
from millstream.redis_client.client import Client
from millstream.redis_client.key_names import HandlerKeys, audit_key
from tests.support.commandline import call
from tests.support.consoles import Browser, Page, fill_with

_PARKED = "/key?handler=shop.pay&stream=orders&key=parked+x"
_FAILING = "/key?handler=shop.pay&stream=orders&key=failing+x"
_HANDLER = "/handler?name=shop.pay"
_LETTERS = "/letters?handler=shop.pay"


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form on the data of `fill_with(client, "x")`.

    * `page`: its page, or the one from which links to `then` lead there, one after the other
    * `fields`: what is filled in; `typed`: what its question asks to type
    * `given`: the command that has to run before, so that the page has the form
    * `action`: what the audit calls it
    * `command`: the words of the command; those in braces are ids, and `by` the name of the operator
    * `reads_only`: it changes nothing, and answers what the command prints
    """

    page: str
    then: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    typed: str = ""
    given: str = ""
    action: str
    command: str
    reads_only: bool = False

    def open(self, browser: Browser) -> Page:
        """The page that has the form."""
        page = browser.get(self.page)
        for beginning in self.then:
            page = browser.get(next(one for one in page.links if one.startswith(beginning)))
        return page

    def prepare(self, client: Client) -> dict[str, str]:
        """Add what the form needs, without records of earlier actions. Returns the ids that commands need."""
        fill_with(client, "x")
        if self.given:
            assert call(*shlex.split(self.given), url=client.url).code == 0
        Group(client, "orders", "readers").create()
        client.execute("DEL", audit_key())
        ((letter, _),) = client.execute("XRANGE", HandlerKeys("shop", "pay", "orders").dead_letters, "-", "+")
        (delayed,) = DelayedMessages(client).find("orders", limit=2)
        return {"letter": letter.decode(), "delayed": delayed.id}

    def filled_in(self, browser: Browser, path: str) -> dict[str, Any]:
        """What the browser sends to `path` once the form is filled in."""
        return {**self.open(browser).form(path), **self.fields}

    def send(self, browser: Browser, path: str) -> Page:
        """Fill the form in and send it to `path`, and answer its question if it asks one."""
        answer = browser.send(self.open(browser), path, **self.fields)
        if "Yes, do it" not in answer.text:
            return answer
        return browser.send(answer, path, **({"confirm": self.typed} if self.typed else {}))


FORMS: Mapping[str, Form] = {
    "/stuck/unpark": Form(
        page="/stuck",
        fields={"stuck": "handler=shop.pay&stream=orders&key=parked+x"},
        action="key unpark",
        command="key unpark shop.pay 'parked x'",
    ),
    "/handler/pause": Form(page=_HANDLER, given="resume shop.pay", action="pause", command="pause shop.pay"),
    "/handler/resume": Form(page=_HANDLER, action="resume", command="resume shop.pay"),
    "/handler/rate": Form(page=_HANDLER, fields={"rate": "60/m"}, action="rate set", command="rate set shop.pay 60/m"),
    "/handler/rate/clear": Form(
        page=_HANDLER, given="rate set shop.pay 2", action="rate clear", command="rate clear shop.pay"
    ),
    "/key/park": Form(
        page=_FAILING,
        fields={"reason": "the bank is closed"},
        action="key park",
        command="key park shop.pay 'failing x' --reason 'the bank is closed'",
    ),
    "/key/unpark": Form(page=_PARKED, action="key unpark", command="key unpark shop.pay 'parked x'"),
    "/key/skip": Form(
        page=_PARKED,
        action="key skip",
        command="key skip shop.pay 'parked x' --reason 'skipped by {by}' --yes",
    ),
    "/key/reset": Form(page=_PARKED, action="state reset", command="state reset shop.pay 'parked x' --yes"),
    "/letter/edit": Form(
        page=_LETTERS,
        then=("/letter?", "/letter/edit"),
        fields={"name0": "n", "value0": "1"},
        action="dlq edit",
        command="dlq edit {letter} --set n=1 --remove text --by '{by}' --yes",
    ),
    "/letters/export": Form(page=_LETTERS, action="dlq show", command="dlq show shop.pay --json", reads_only=True),
    "/letters/redrive": Form(page=_LETTERS, action="dlq redrive", command="dlq redrive shop.pay --yes"),
    "/letters/redrive/stop": Form(page=_LETTERS, action="dlq stop", command="dlq stop shop.pay"),
    "/letters/purge": Form(page=_LETTERS, typed="1", action="dlq purge", command="dlq purge shop.pay --yes"),
    "/group/set-id": Form(
        page="/group?stream=orders&group=readers",
        fields={"after": "2023-11-15T00:00"},
        action="group set-id",
        command="group set-id orders readers --after 2023-11-15T00:00 --yes",
    ),
    "/workers/drain": Form(page="/workers", typed="w-0", action="drain", command="drain w-0 --app shop --yes"),
    "/delayed/cancel": Form(
        page="/delayed?stream=orders", action="delayed cancel", command="delayed cancel orders {delayed} --yes"
    ),
}
"""By the paths to which they are sent."""
