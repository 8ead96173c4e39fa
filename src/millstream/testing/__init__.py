"""Test tools for programs on millstream; import only the module you use, so that you do not load the others.

`millstream.testing.run`: one handler on one message, without Redis; `handler_run` has it.
`millstream.testing.plugin`: pytest fixtures with a real redis-server, active once millstream is installed.
`millstream.testing.topologies`: Cluster, Sentinel, TLS and ACL deployments of local processes.
`millstream.testing.contract`: the handler contract, which every engine keeps; `contract_cases` has the cases.
`millstream.testing.history`: the history checker, which finds lost, duplicated and out-of-order messages, mistimed timers,
and runs beyond a limit.
`millstream.testing.invariants`: the invariants of key queues.
`millstream.testing.proxy`: a TCP proxy that breaks connections to Redis at chosen commands.
"""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.testing.handler_run import HandlerRun, SetTimer, run
else:
    __getattr__, __dir__ = lazy_names(__name__, {"millstream.testing.handler_run": ("HandlerRun", "SetTimer", "run")})

__all__ = ["HandlerRun", "SetTimer", "run"]
