"""What a reading loop has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts of messages since the loop began; `refused` are commits that came too late."""

    read: int = 0
    adopted: int = 0
    committed: int = 0
    dead: int = 0
    retried: int = 0
    refused: int = 0
    handed_back: int = 0
