"""ReplayProcess: runs a handler on one message after another in a process of its own, with the retries of a worker."""

import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Literal, Self

import msgspec

from millstream.cli.log_output import settings as log_settings
from millstream.cli.replay_child import (
    AttemptCall,
    AttemptReply,
    HandlerFacts,
    ReplayJob,
    TimerReply,
    read_frame,
    write_frame,
)
from millstream.errors import ConfigError
from millstream.handlers.dead_letter import Reason
from millstream.handlers.upcasting import parse_state
from millstream.redis_client.replies import mapping_of
from millstream.worker.process.supervisor import describe_end

_STDERR = 2
_GRACE_MS = 5_000.0

Result = Literal["done", "dead-letter", "parked", "blocked", "other-key"]
"""What became of a message: see `Replayed`."""

_encode_sorted = msgspec.msgpack.Encoder(order="sorted").encode


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a handler did with one message.

    * `result`: "done"; "dead-letter"; "parked" or "blocked": its key would wait; or "other-key": this handler gives the
      message another key, and has not run
    * `outputs`: each as names and values in turn; `timers`: those of the key that it has set and cancelled, in order
    * `state`: of the key afterwards, as it is stored in Redis; `takes_state`: the handler takes a State
    * `reason`, `error`, `traceback`: why it failed; `attempts`: how many it took
    """

    result: Result
    outputs: Sequence[Sequence[bytes]]
    timers: Sequence[TimerReply]
    state: bytes
    takes_state: bool
    reason: Reason | None
    error: str
    traceback: str
    attempts: int

    def differs_from(self, other: "Replayed") -> bool:
        """Whether result, reason, outputs, timers or state differ; the order of names does not count."""
        return self._compared() != other._compared()

    def _compared(self) -> tuple[object, ...]:
        outputs = [mapping_of(one) for one in self.outputs]
        timers = [(one.name, one.delay_ms, mapping_of(one.pairs)) for one in self.timers]
        return self.result, self.reason, outputs, timers, _encode_sorted(parse_state(self.state))


class _Crashed(Exception):
    """The process ended within an attempt; the text says how."""


class _Overran(Exception):
    """An attempt exceeded its time limit, and its process was ended."""


class ReplayProcess:
    """Runs `handler` of the app `target` for the messages of `key`. Close it, or use it in a `with` block.

    `env`: the environment of the process. Raises ConfigError if it cannot load the handler.
    """

    def __init__(self, target: str, handler: str, key: bytes, env: Mapping[str, str]) -> None:
        self._target = target
        self._handler = handler
        self._key = key
        self._env = dict(env)
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._replies.close()
        with suppress(BrokenPipeError):
            self._calls.close()

    def replay(self, stream: str, entry_id: str, pairs: Sequence[bytes], state: bytes) -> Replayed:
        """Run the handler on a message until an attempt succeeds or none is left. It waits for no back-off."""
        call = AttemptCall(stream=stream, id=entry_id, pairs=pairs, state=state)
        crashes = 0
        while True:
            try:
                reply = self._attempt(call)
            except _Overran:
                reply = self._attempt(replace(call, ended="time limit"))
            except _Crashed as crash:
                crashes += 1
                if crashes < self.facts.crashes_allowed:
                    continue
                cause = f"{crashes} processes crashed while they ran this message and nothing else; the last {crash}"
                reply = self._attempt(replace(call, ended="crash", cause=cause))
            if reply.result != "retry" or call.attempt >= self.facts.attempts:
                attempts = call.attempt + crashes - (reply.reason == "crashed")
                return _replayed(reply, attempts, takes_state=self.facts.wants_state)
            call = replace(call, attempt=call.attempt + 1)

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            # -P: the process finds modules where this one does, and not first in the working folder.
            (sys.executable, "-P", "-m", "millstream.cli.child", "replay_child"),
            stdin=subprocess.PIPE,
            stdout=_STDERR,
            env=self._env,
            pass_fds=(writing,),
        )
        os.close(writing)
        self._replies: IO[bytes] = os.fdopen(reading, "rb")
        assert self._process.stdin is not None
        self._calls: IO[bytes] = self._process.stdin
        job = ReplayJob(target=self._target, handler=self._handler, key=self._key, reply_to=writing, log=log_settings())
        write_frame(self._calls, job)
        facts = read_frame(self._replies, HandlerFacts)
        if facts is None or facts.error:
            error = f"{self._target!r}: its process {self._end()} at its start" if facts is None else facts.error
            self.close()
            raise ConfigError(error)
        self.facts = facts

    def _attempt(self, call: AttemptCall) -> AttemptReply:
        """Run one attempt; raise _Crashed or _Overran if it ended the process, which is started again then."""
        try:
            write_frame(self._calls, call)
        except BrokenPipeError:  # it ended after its last reply
            self._restart()
            write_frame(self._calls, call)
        grace_ms = _GRACE_MS if self.facts.is_async else 0.0  # an event loop ends its attempts itself, if it turns
        limit_s = None if call.ended else (self.facts.time_limit_ms + grace_ms) / 1000
        if not select.select([self._replies], [], [], limit_s)[0]:
            self._restart()
            raise _Overran
        reply = read_frame(self._replies, AttemptReply)
        if reply is None:
            how = self._end()
            self._restart()
            raise _Crashed(how)
        return reply

    def _restart(self) -> None:
        self.close()
        self._start()

    def _end(self) -> str:
        """How the process ended."""
        return describe_end(self._process.wait())


def _replayed(reply: AttemptReply, attempts: int, *, takes_state: bool) -> Replayed:
    return Replayed(
        result="blocked" if reply.result == "retry" else reply.result,
        outputs=reply.outputs,
        timers=reply.timers,
        state=reply.state,
        takes_state=takes_state,
        reason=reply.reason,
        error=reply.error,
        traceback=reply.traceback,
        attempts=attempts,
    )
