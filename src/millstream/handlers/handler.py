"""Handler: a handler compiled once: its streams, its key, and how messages become its arguments."""

import fnmatch
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeGuard

from millstream.errors import ConfigError, DecodeError, MissingKey, did_you_mean, text_of
from millstream.handlers.decoding import compile_decoder, wire_types
from millstream.handlers.limits import with_limit
from millstream.handlers.upcasting import (
    MessageUpcast,
    StateUpcast,
    check_upcasts,
    check_version_field,
    current_version,
    upcast_message,
)
from millstream.model import Breaker, Limit, Message, Retry, State, value_of
from millstream.redis_client.key_names import (
    check_base,
    check_identifier,
    check_service,
    check_stream,
    to_wire,
)

KeyFunction = Callable[[Message], str | bytes | int | None]
Source = Literal["message", "model", "state"]


class HandlerOptions(TypedDict, total=False):
    """The options of `App.handler`, which says what each means; `Handler` has their defaults."""

    pattern: str | None
    key: str | KeyFunction | None
    into: str | None
    into_maxlen: int | None
    retry: Retry
    missing_key: Literal["dead-letter", "unordered"]
    concurrency: int
    time_limit_ms: float
    state_ttl_ms: int | None
    state_upcasts: Sequence[StateUpcast]
    message_upcasts: Sequence[MessageUpcast]
    rate: float | None
    limit: Limit | None
    batch_size: int
    batch_wait_ms: float
    partitions: int | None
    order: Literal["key", "stream"]
    announced: str | None
    breaker: Breaker | None
    name: str


OPTIONS = tuple(HandlerOptions.__annotations__)

_MIN_RATE = 0.000_001

BAD_RATE = "rate must be a number of messages a second, at least 0.000001"
"""The error text of a rate that is none."""

_MAX_BATCH = 1_000
_MAX_TIME_LIMIT_MS = 7 * 86_400_000
_MAX_STATE_TTL_MS = 3_650 * 86_400_000
_MAX_WAIT_MS = 60_000
_DECORATORS = {"handler": 'handler("stream")', "stage": 'stage("stream")', "schedule": 'every("5m", stream="stream")'}
_OF_KEYS = {"park": "parks keys", "cancel": "cancels the rest of keys"}


@dataclass(frozen=True, kw_only=True)
class Handler:
    """One handler of an app; `App.handler` says what its options mean.

    * `app`, `name`: they name its state, committed offset and dead letters in Redis: do not change them lightly
    * `streams` / `pattern` / `announced`: the streams it reads; exactly one of the three
    * `arguments`: the source of each parameter of the function
    * `model`: the class that messages are decoded to; None if it takes the Message only
    * `in_batches`: it takes lists of messages; with a key, of one key each, in order
    """

    app: str
    name: str
    function: Callable[..., Any]
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    key: str | KeyFunction | None = None
    into: str | None = None
    into_maxlen: int | None = None
    retry: Retry = field(default_factory=Retry)
    missing_key: Literal["dead-letter", "unordered"] = "dead-letter"
    concurrency: int = 100
    time_limit_ms: float = 300_000.0
    state_ttl_ms: int | None = None
    state_upcasts: Sequence[StateUpcast] = ()
    message_upcasts: Sequence[MessageUpcast] = ()
    rate: float | None = None
    limit: Limit | None = None
    in_batches: bool = False
    batch_size: int = 100
    batch_wait_ms: float = 0.0
    partitions: int | None = None
    order: Literal["key", "stream"] = "key"
    announced: str | None = None
    breaker: Breaker | None = field(default_factory=Breaker)
    arguments: tuple[tuple[str, Source], ...] = ()
    model: type | None = None
    is_async: bool = False

    @functools.cached_property
    def label(self) -> str:
        """`app.handler`, its name in logs, errors and Redis."""
        return f"{self.app}.{self.name}"

    @functools.cached_property
    def wants_state(self) -> bool:
        """True if the handler takes the state of its key."""
        return any(source == "state" for _, source in self.arguments)

    @functools.cached_property
    def state_version(self) -> int:
        """The version of the states that it writes; 1 without state upcasts."""
        return current_version(self.state_upcasts)

    @functools.cached_property
    def _message_only(self) -> str | None:
        return self.arguments[0][0] if [source for _, source in self.arguments] == ["message"] else None

    @functools.cached_property
    def _model_argument(self) -> str | None:
        return next((name for name, source in self.arguments if source == "model"), None)

    @functools.cached_property
    def _other_arguments(self) -> Sequence[tuple[str, bool]]:
        """Those that are not the model; True for a message, False for the state."""
        return [(name, source == "message") for name, source in self.arguments if source != "model"]

    @functools.cached_property
    def takes_published(self) -> bool:
        """True if its only argument is the message as it was published, and may be passed by position.

        Then `bind` has nothing to do. A decorated function may take its arguments by name alone.
        """
        return self._message_only is not None and self.is_direct

    @functools.cached_property
    def is_direct(self) -> bool:
        """True if it may be called by position, with the message as published or the model, and then the state if it takes one."""
        names, sources = [name for name, _ in self.arguments], [source for _, source in self.arguments]
        if sources not in (["message"], ["model"], ["message", "state"], ["model", "state"]) or self.message_upcasts:
            return False
        if not isinstance(self.function, types.FunctionType):
            return False
        code = self.function.__code__
        return code.co_varnames[: code.co_argcount] == tuple(names)

    @property
    def decoder(self) -> Callable[[Sequence[bytes]], object] | None:
        """The function that decodes an entry's fields into the model; None without a model. It cannot be pickled."""
        return None if self.model is None else _decoder(self.model)

    @property
    def key_field(self) -> str | None:
        """The field that it is keyed by; None without a key or with a key function."""
        return self.key if isinstance(self.key, str) else None

    @functools.cached_property
    def key_name(self) -> bytes:
        """The bytes of `key_field`; b"" without one."""
        return to_wire(self.key_field or "")

    def key_in(self, pairs: Sequence[bytes]) -> bytes | None:
        """Return the key of an entry with these names and values, for a handler with a `key_field`; None if it has none."""
        return value_of(pairs, self.key_name) or None

    def key_of(self, message: Message) -> bytes | None:
        """Return the message's key, or None if the handler has no key or the message lacks it.

        Raises DecodeError if the key function fails or returns an unsupported type.
        """
        if self.key is None:
            return None
        if isinstance(self.key, str):
            return self.key_in(message.pairs)
        try:
            found = self.key(message)
            if isinstance(found, str):
                found = found.encode()
        # A key function may raise anything, SystemExit too: one message must not end the worker.
        except BaseException as error:
            raise DecodeError(f"the key function raised {type(error).__name__}: {text_of(error)}") from error
        if isinstance(found, bool) or not isinstance(found, (bytes, int, type(None))):
            raise DecodeError(f"the key function returned a {type(found).__name__}; return text, bytes, int or None")
        return str(found).encode() if isinstance(found, int) else found or None

    def bind(self, message: Message, state: State) -> dict[str, Any]:
        """Return the handler's arguments for `message`, which is upcast first.

        Raises DecodeError if an upcast fails or the fields do not fit the model.
        """
        if self.message_upcasts:
            message = upcast_message(message, self.message_upcasts)
        if self._message_only is not None:
            return {self._message_only: message}
        bound: dict[str, Any] = {}
        if self._model_argument is not None and self.model is not None:
            bound[self._model_argument] = _decoder(self.model)(message.pairs)
        for name, is_message in self._other_arguments:
            bound[name] = message if is_message else state
        return bound

    def missing_key_error(self) -> MissingKey:
        """Return the error of a message that lacks its key."""
        wanted = f"field {self.key!r}" if isinstance(self.key, str) else "key: the key function returned none"
        return MissingKey(f"the message has no {wanted}, which {self.label} is keyed by")


@functools.lru_cache(maxsize=256)
def _decoder(model: type) -> Callable[[Sequence[bytes]], object]:
    # Cached outside the handler: a handler is pickled to other processes, and a compiled decoder cannot be.
    return compile_decoder(model)


def compile_handler(
    app: str, function: Callable[..., Any], streams: tuple[str, ...], options: Mapping[str, Any]
) -> Handler:
    """Check and compile a handler once, before any message. Raises ConfigError with one line on what to change."""
    name = name_of_function("handler", function, options.get("name"))
    where = f"handler {name!r}"
    if isinstance(function, type):  # a call of it would only make an object, for each message
        raise ConfigError(f"{where} is a class: write a function with def, or register a method of an object")
    if inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where} is an async generator: return its outputs as a list, instead of yielding them")
    for unknown in options.keys() - set(OPTIONS):
        hint = did_you_mean(unknown, OPTIONS, f"known options: {', '.join(OPTIONS)}")
        raise ConfigError(f"{where}: unknown option {unknown!r}; {hint}")
    _check_options(where, streams, options)
    options = _with_order_key(where, options)
    arguments, model, in_batches = _arguments(where, function)
    options = with_limit(where, options, in_batches=in_batches, model=model)
    _check_batches(where, in_batches, options)
    _check_partitions(where, streams, options)
    key = options.get("key")
    if isinstance(key, str) and model is not None and key not in wire_types(model):
        names = list(wire_types(model))
        hint = did_you_mean(key, names, f"it has {', '.join(names)}")
        raise ConfigError(f"{where}: key {key!r} is not a field of {model.__name__}; {hint}")
    takes_state = any(source == "state" for _, source in arguments)
    if key is None and takes_state:
        raise ConfigError(f'{where} takes a State but has no key; give it key="field", since state is kept by key')
    _check_state_ttl(where, options.get("state_ttl_ms"), takes_state=takes_state)
    upcasts = _upcasts(where, model, options, takes_state=takes_state)
    return Handler(
        app=app,
        function=function,
        streams=streams,
        arguments=arguments,
        model=model,
        in_batches=in_batches,
        is_async=inspect.iscoroutinefunction(function),
        **{**options, **upcasts, "name": name},
    )


def name_of_function(kind: str, function: object, name: object) -> str:
    """Return the name that a function is registered under: `name`, or its own. Raises ConfigError if it has none, or is
    no function.

    `kind`: what it is to be, as in `App.handler`, for the error text
    """
    if not callable(function):
        raise ConfigError(
            f"{function!r} is not a function; a {kind} is a function, with @app.{_DECORATORS[kind]} above it"
        )
    own = name or getattr(function, "__name__", "")
    if not own:
        raise ConfigError(f"{function!r} has no name: write a function with def that calls it")
    return check_identifier(f"{kind} name", str(own))


def is_plain(function: Callable[..., Any]) -> bool:
    """Return whether a call of it runs it: it is neither async nor a generator."""
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    return not any(is_one(function) for is_one in kinds)


def _check_model(where: str, model: type) -> None:
    try:
        _decoder(model)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _with_order_key(where: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the key that `order` implies."""
    order, announced = options.get("order", "key"), options.get("announced")
    if order not in ("key", "stream"):
        raise ConfigError(f"{where}: order must be 'key' (the default) or 'stream'")
    if order == "key":
        if announced is not None:
            raise ConfigError(f'{where}: announced streams are leased whole; add order="stream"')
        return options
    for other in ("key", "partitions"):
        if options.get(other) is not None:
            raise ConfigError(
                f'{where}: order="stream" keeps whole streams in order and excludes {other}; drop one of the two'
            )
    if announced is not None:
        check_service(announced)
    return {**options, "key": stream_of}


def stream_of(message: Message) -> bytes:
    """Return the key of a message in a handler with order="stream": the stream's name."""
    return to_wire(message.stream)


def check_streams(where: str, streams: Sequence[str]) -> None:
    """Raise ConfigError if `streams` cannot be read together."""
    if any(isinstance(stream, list | tuple) for stream in streams):
        raise ConfigError(
            f'{where}: give several streams one after the other, like "orders", "payments", not as a list'
        )
    if any(not isinstance(stream, str) or not stream for stream in streams):
        raise ConfigError(f'{where}: stream names must be non-empty text, like "orders"')
    if any("," in stream or stream != stream.strip() for stream in streams):
        raise ConfigError(f"{where}: a stream's name must not contain a comma nor begin or end with a space")
    for stream in streams:
        if "*" in stream:  # a handler of a stream of this very name would wait for ever
            raise ConfigError(f"{where}: {stream!r} is a pattern, not a stream: write pattern={stream!r}")
        check_stream(stream)
    if len(set(streams)) != len(streams):
        raise ConfigError(f"{where}: a stream is named twice")


def _check_options(where: str, streams: tuple[str, ...], options: Mapping[str, Any]) -> None:
    if sum(map(bool, (streams, options.get("pattern"), options.get("announced")))) != 1:
        raise ConfigError(
            f'{where}: name the streams it reads, or give pattern="orders.*" or announced="service", one of the three'
        )
    check_streams(where, streams)
    key = options.get("key")
    if key is not None and not callable(key) and not (isinstance(key, str) and key):
        raise ConfigError(f"{where}: key must be the name of a field or a function of the Message")
    if inspect.iscoroutinefunction(key):
        raise ConfigError(f"{where}: the key function must be a plain function, not async")
    if not isinstance(options.get("retry", Retry()), Retry):
        raise ConfigError(f"{where}: retry must be a Retry, like retry=Retry(attempts=4)")
    if not isinstance(options.get("breaker"), Breaker | None):
        raise ConfigError(f"{where}: breaker must be a Breaker, like breaker=Breaker(first=50), or None for none")
    then = options.get("retry", Retry()).then
    if key is None and options.get("order") != "stream" and then in _OF_KEYS:
        raise ConfigError(
            f'{where}: Retry(then="{then}") {_OF_KEYS[then]}, and the handler has none; give it key="field"'
        )
    into = options.get("into")
    if into is not None and not (isinstance(into, str) and into):
        raise ConfigError(f"{where}: into must be the name of a stream")
    if into is not None and (into in streams or fnmatch.fnmatchcase(into, options.get("pattern") or "")):
        raise ConfigError(f"{where}: it would read its own output: into={into!r} is one of its streams; rename one")
    if options.get("into_maxlen") is not None and not (
        isinstance(options["into_maxlen"], int) and options["into_maxlen"] > 0
    ):
        raise ConfigError(f"{where}: into_maxlen must be a positive number of entries")
    if options.get("missing_key", "dead-letter") not in ("dead-letter", "unordered"):
        raise ConfigError(f"{where}: missing_key must be 'dead-letter' or 'unordered'")
    concurrency = options.get("concurrency", 1)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ConfigError(f"{where}: concurrency must be a whole number of at least 1")
    limit = options.get("time_limit_ms", 1)
    if not _is_number(limit) or not 0 < limit <= _MAX_TIME_LIMIT_MS:
        raise ConfigError(f"{where}: time_limit_ms must be a number of milliseconds above 0 and at most a week")
    rate = options.get("rate")
    if rate is not None and not (_is_number(rate) and is_rate(rate)):
        raise ConfigError(f"{where}: {BAD_RATE}")


def _check_batches(where: str, in_batches: bool, options: Mapping[str, Any]) -> None:
    misplaced = [name for name in ("batch_size", "batch_wait_ms") if name in options]
    if misplaced and not in_batches:
        raise ConfigError(f"{where}: {misplaced[0]} is for handlers that take a list[Message] or a list of their model")
    if in_batches and options.get("order") == "stream":
        raise ConfigError(
            f'{where}: order="stream" runs one message at a time; take one message, or give it key="field"'
        )
    if in_batches and options.get("retry", Retry()).then == "cancel":
        raise ConfigError(f'{where}: Retry(then="cancel") is for handlers of one message at a time; take one message')
    size, wait_ms = options.get("batch_size", 1), options.get("batch_wait_ms", 0)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_BATCH:
        raise ConfigError(f"{where}: batch_size must be a whole number from 1 to {_MAX_BATCH:,}")
    if not _is_number(wait_ms) or not 0 <= wait_ms <= _MAX_WAIT_MS:
        raise ConfigError(f"{where}: batch_wait_ms must be a number of milliseconds from 0 to {_MAX_WAIT_MS:,}")


def _check_state_ttl(where: str, ttl_ms: object, *, takes_state: bool) -> None:
    if ttl_ms is None:
        return
    if not takes_state:
        raise ConfigError(f"{where}: state_ttl_ms is for handlers that take a State; add one, or remove the option")
    if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int) or not 1 <= ttl_ms <= _MAX_STATE_TTL_MS:
        raise ConfigError(
            f"{where}: state_ttl_ms must be a whole number of milliseconds from 1 to {_MAX_STATE_TTL_MS:,}"
        )


def _upcasts(
    where: str, model: type | None, options: Mapping[str, Any], *, takes_state: bool
) -> dict[str, tuple[Callable[..., Any], ...]]:
    """Return the checked functions of the two options, where they are given."""
    found = {name: options[name] for name in ("state_upcasts", "message_upcasts") if name in options}
    for name, upcasts in found.items():
        check_upcasts(where, name, upcasts)
    if "state_upcasts" in found and not takes_state:
        raise ConfigError(f"{where}: state_upcasts is for handlers that take a State; add one, or remove the option")
    if "message_upcasts" in found and model is not None:
        check_version_field(where, model, current_version(found["message_upcasts"]))
    return {name: tuple(upcasts) for name, upcasts in found.items()}


def _check_partitions(where: str, streams: tuple[str, ...], options: Mapping[str, Any]) -> None:
    if options.get("partitions") is None:
        return
    if options.get("key") is None:
        raise ConfigError(f'{where} reads partitions, which order messages by key, and has no key; give it key="field"')
    if not streams:
        raise ConfigError(f"{where}: partitions need the name of a base stream, not a pattern")
    try:
        check_partition_count(options["partitions"])
        for stream in streams:
            check_base(stream)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def is_rate(number: float) -> bool:
    """Return whether `number` may be a rate. Below one message in 12 days Redis could not count the time."""
    return _MIN_RATE <= number < math.inf


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _arguments(where: str, function: Callable[..., Any]) -> tuple[tuple[tuple[str, Source], ...], type | None, bool]:
    """Return the source of each parameter by its annotation, the model, and whether the handler takes lists."""
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError) as error:
        advice = "" if inspect.isroutine(function) else "; write a function with def that calls it"
        raise ConfigError(f"{where}: its annotations cannot be read: {str(error).rstrip('.')}{advice}") from error
    found: list[tuple[str, Source]] = []
    model: type | None = None
    lists = 0
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: parameter {name!r} must be a plain parameter, not *args or positional-only")
        hint = hints.get(name, Message if not found else None)
        if typing.get_origin(hint) is list and hint != list[State]:
            (hint,) = typing.get_args(hint)
            lists += 1
        if hint is Message:
            found.append((name, "message"))
        elif hint is State:
            found.append((name, "state"))
        elif isinstance(hint, type) and model is None:
            _check_model(f"{where}: parameter {name!r}", hint)
            found.append((name, "model"))
            model = hint
        else:
            wrong = "" if hint is None else f", not with {inspect.formatannotation(hint)}"
            raise ConfigError(
                f"{where}: parameter {name!r} must be annotated{wrong}: use a model (dataclass, msgspec.Struct, TypedDict "
                "or pydantic model; one at the most), Message or State, or a list of models or of Message"
            )
    if not any(source in ("message", "model") for _, source in found):
        raise ConfigError(f"{where} must take the message: def {function.__name__}(message: Message) or a typed model")
    if 0 < lists < sum(source != "state" for _, source in found):
        raise ConfigError(f"{where} takes lists and single values: make all of its parameters lists, except a State")
    return tuple(found), model, lists > 0


MAX_PARTITIONS = 4_096


def check_partition_count(count: int) -> int:
    """Return `count` if it is a valid number of partitions. Raises ConfigError otherwise."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_PARTITIONS:
        raise ConfigError(f"partitions={count!r}: use a whole number from 1 to {MAX_PARTITIONS:,}")
    return count
