"""What is sent to a master and what it answers, as its OpenAPI document has it."""

from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from millstream.services.master.settings import MOST_TICKETS

Name = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("consumer", "consumer_name", "consumerName"),
        max_length=100,
        description="The consumer's name in the group; `consumer_name` will do, too.",
    ),
]
MessageId = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("message_id", "messageId"), max_length=50, description="Id of the stream's entry."
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Registering(_Body):
    """A consumer that wants messages."""

    consumer: Name
    health_url: Annotated[
        str | None,
        Field(
            validation_alias=AliasChoices("health_url", "healthURL", "healthUrl"),
            description="Answers GET with 2xx while the consumer is well. Without one, send heartbeats.",
        ),
    ] = None
    max_tickets: Annotated[int | None, Field(ge=1, le=MOST_TICKETS, description="Messages that it has at once.")] = None
    instance: Annotated[
        str, Field(max_length=100, description="Names this life of it: registering with the same one is no restart.")
    ] = ""


class Acknowledging(_Body):
    """A message that is done; or several, as `message_ids`."""

    consumer: Name
    message_id: Annotated[
        str | None,
        Field(
            validation_alias=AliasChoices("message_id", "messageId"),
            max_length=50,
            description="Id of the stream's entry.",
        ),
    ] = None
    message_ids: Annotated[
        list[Annotated[str, Field(max_length=50)]],
        Field(
            validation_alias=AliasChoices("message_ids", "messageIds"), max_length=MOST_TICKETS,
            description="Instead of `message_id`: several at once.",
        ),
    ] = []  # fmt: skip

    @model_validator(mode="after")
    def _names_some(self) -> "Acknowledging":
        if (self.message_id is None) == (not self.message_ids):
            raise ValueError("name a message_id, or some message_ids")
        return self


class Failing(_Body):
    """A message that could not be done. Do not acknowledge it as well."""

    consumer: Name
    message_id: MessageId
    error: Annotated[str, Field(max_length=4_000)] = ""
    retry: Annotated[bool, Field(description="False: it would fail again; it becomes a dead letter.")] = True


class Releasing(_Body):
    """Messages that are given back untried: one, or all that the consumer has, which then leaves."""

    consumer: Name
    message_id: Annotated[str | None, Field(validation_alias=AliasChoices("message_id", "messageId"))] = None


class Heartbeat(_Body):
    """A sign of life."""

    consumer: Name


class Registered(BaseModel):
    """How to go on: read `XREADGROUP GROUP group consumer STREAMS stream 0`."""

    consumer: str
    stream: str
    group: str
    max_tickets: int
    ping_interval_s: float


class NotAcknowledged(BaseModel):
    """One of several messages that is not the consumer's: with the `status` that the call would have had for it alone."""

    message_id: str
    status: int
    error: str


class Acknowledged(BaseModel):
    """What the consumer says is so. `known`: all of it was before, by the same consumer.

    `next`: ids of messages that the consumer has been given just now. `refused`, if there were several `message_ids`: those
    that are not so.
    """

    known: bool
    next: list[str]
    refused: list[NotAcknowledged] = []


class Failed(BaseModel):
    """What becomes of it: `retry`, `dead-letter` or `park`. `next`: ids of messages that were given just now."""

    outcome: str
    next: list[str]


class Released(BaseModel):
    """How many messages were given back."""

    released: int


class Alive(BaseModel):
    """What the consumer has: ids of its messages."""

    message_ids: list[str]


class Ticket(BaseModel):
    """A ticket that somebody works on, or that waits for one: `state` and `why` say which and for what.

    `ticket_id` is null for a message without one. `message_ids` are the first of those that are not done, in order.
    """

    ticket_id: str | None
    consumer_name: str | None
    state: str
    why: str
    messages: int
    message_ids: list[str]
    since_ms: int | None
    failed: int


class Tickets(BaseModel):
    """One page. `cursor`: for the next one; null on the last."""

    tickets: list[Ticket]
    cursor: str | None


class Consumer(BaseModel):
    """A registered consumer: `state` is alive, stuck (it took too long) or dead. Times are Unix milliseconds."""

    consumer_name: str
    health_url: str | None
    state: str
    max_tickets: int
    registered_ms: int
    healthy_ms: int
    ticket_ids: list[str]
    message_ids: list[str]


class Consumers(BaseModel):
    """One page. `cursor`: for the next one; null on the last."""

    consumers: list[Consumer]
    cursor: str | None


class Standing(BaseModel):
    """Whether this master does its work, and why not."""

    status: str
    master: str
    reasons: list[str]


class Problem(BaseModel):
    """Why a request was refused, in one line."""

    error: str
