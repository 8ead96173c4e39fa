"""The history checker: finds lost, duplicated, out-of-order, overlapping and stale effects in a log of events, timers that
came early, late or after all, and runs beyond a limit.

There are two entry points: `check` verifies a log of `Event`s that producers and workers wrote with `Recorder`;
`check_outputs` verifies the effects in an output stream. Both are pure functions.

Order never comes from the clocks of different machines. Events are ordered

1. by `position`, the index of the effect in the log that it was written to, which its server assigned;
2. without positions, by `at`, if every event to be compared has it: a monotonic clock that all their writers
   share (on Linux, processes of one boot of one machine);
3. otherwise in the order given: lines of one file in order, and files one after the other.

An event with a position is never compared with one without. Ties keep the order given.

The ideas: verifying a queue by its recorded history, Jepsen's `total-queue` checker (K. Kingsbury); positions
instead of clocks, L. Lamport, "Time, Clocks, and the Ordering of Events", 1978; fencing tokens, M. Kleppmann,
"How to do distributed locking", 2016.
"""

from millstream.testing.history.checks import check, check_outputs
from millstream.testing.history.events import Event, EventLog, Kind, Recorder, read_events
from millstream.testing.history.report import Fault, Finding, HistoryError, Report

__all__ = [
    "Event",
    "EventLog",
    "Fault",
    "Finding",
    "HistoryError",
    "Kind",
    "Recorder",
    "Report",
    "check",
    "check_outputs",
    "read_events",
]
