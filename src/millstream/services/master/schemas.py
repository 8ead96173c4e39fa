"""Requests and responses of the master's API, as in its OpenAPI document."""

from typing import Annotated

from fastapi import Query
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, model_validator

from millstream.services.master.settings import MAX_ERROR_CHARS, MAX_TICKETS, NAME_PATTERN

_ID_PATTERN = r"^[0-9]{1,20}(-[0-9]{1,20})?$"
# Patterns are only documented: the functions that check the values refuse them with a text that says what to do.
_ID_SCHEMA: dict[str, JsonValue] = {"pattern": _ID_PATTERN, "minLength": 1}

Cursor = Annotated[
    str | None,
    Query(
        description="That of the page before; none for the first page.",
        json_schema_extra={"pattern": "^([0-9a-f]{2})*$"},
    ),
]
Name = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("consumer", "consumer_name", "consumerName"),
        max_length=100,
        description="The consumer's name in the group. `consumer_name` is accepted, too.",
        json_schema_extra={"pattern": f"^{NAME_PATTERN}$", "minLength": 1},
    ),
]
MessageId = Annotated[
    str,
    Field(
        validation_alias=AliasChoices("message_id", "messageId"),
        max_length=50,
        description="Id of the stream entry.",
        json_schema_extra=_ID_SCHEMA,
    ),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class RegisterRequest(_Body):
    """Registers a consumer."""

    consumer: Name
    health_url: Annotated[
        str | None,
        Field(
            validation_alias=AliasChoices("health_url", "healthURL", "healthUrl"),
            description="Answers GET with 2xx while the consumer is healthy. Without one, send heartbeats.",
        ),
    ] = None
    max_tickets: Annotated[int | None, Field(ge=1, le=MAX_TICKETS, description="Messages assigned at once.")] = None
    instance: Annotated[
        str,
        Field(max_length=100, description="Id of the consumer's process: registering with the same one is no restart."),
    ] = ""


class AcknowledgeRequest(_Body):
    """Acknowledges a message, or several as `message_ids`."""

    consumer: Name
    message_id: Annotated[
        str | None,
        Field(
            validation_alias=AliasChoices("message_id", "messageId"),
            max_length=50,
            description="Id of the stream entry.",
            json_schema_extra=_ID_SCHEMA,
        ),
    ] = None
    message_ids: Annotated[
        list[Annotated[str, Field(max_length=50, json_schema_extra=_ID_SCHEMA)]],
        Field(
            validation_alias=AliasChoices("message_ids", "messageIds"),
            max_length=MAX_TICKETS,
            description="Several messages, instead of `message_id`.",
        ),
    ] = []

    @model_validator(mode="after")
    def _names_some(self) -> "AcknowledgeRequest":
        if (self.message_id is None) == (not self.message_ids):
            raise ValueError("give either message_id or message_ids")
        return self


class FailRequest(_Body):
    """Reports a failed message. Do not acknowledge it as well."""

    consumer: Name
    message_id: MessageId
    error: Annotated[str, Field(max_length=MAX_ERROR_CHARS)] = ""
    retry: Annotated[bool, Field(description="False: dead-letter the message, as it would fail again.")] = True


class ReleaseRequest(_Body):
    """Releases a message unprocessed. Without `message_id`: releases all, and unregisters the consumer."""

    consumer: Name
    message_id: Annotated[
        str | None,
        Field(validation_alias=AliasChoices("message_id", "messageId"), max_length=50, json_schema_extra=_ID_SCHEMA),
    ] = None


class HeartbeatRequest(_Body):
    """Reports that a consumer is alive."""

    consumer: Name


class RegisterResponse(BaseModel):
    """The consumer is registered. Read its messages with `XREADGROUP GROUP group consumer STREAMS stream 0`."""

    consumer: str
    stream: str
    group: str
    max_tickets: int
    ping_interval_s: float


class NotAcknowledged(BaseModel):
    """One of several messages that was refused, with the HTTP `status` that a call for it alone would have had."""

    message_id: str
    status: int
    error: str


class AcknowledgeResponse(BaseModel):
    """The messages are acknowledged. `known`: all of them were before, by the same consumer.

    `next`: ids of the messages that the call assigned to the consumer. `refused`: those of several `message_ids` that
    were not acknowledged.
    """

    known: bool
    next: list[str]
    refused: list[NotAcknowledged] = []


class FailResponse(BaseModel):
    """The message's outcome: `retry`, `dead-letter` or `park`. `next`: ids of the messages that the call assigned."""

    outcome: str
    next: list[str]


class ReleaseResponse(BaseModel):
    """The number of released messages."""

    released: int


class HeartbeatResponse(BaseModel):
    """The ids of the consumer's messages."""

    message_ids: list[str]


class Ticket(BaseModel):
    """A ticket with unfinished messages, its `state` and `why` it is in it.

    `ticket_id` is null for a message without one. `message_ids`: the first unfinished messages, in order.
    """

    ticket_id: str | None
    consumer_name: str | None
    state: str
    why: str
    messages: int
    message_ids: list[str]
    since_ms: int | None
    failed: int


class TicketPage(BaseModel):
    """One page. `cursor` gets the next page; null on the last."""

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


class ConsumerPage(BaseModel):
    """One page. `cursor` gets the next page; null on the last."""

    consumers: list[Consumer]
    cursor: str | None


class HealthResponse(BaseModel):
    """Whether this master is healthy, and the reasons if not."""

    status: str
    master: str
    reasons: list[str]


class ErrorResponse(BaseModel):
    """Why a request was refused, in one line."""

    error: str
