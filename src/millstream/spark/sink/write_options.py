"""How entries come into streams: what a sink is told beside its rows."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How entries come into streams.

    * `maxlen`, `minid`: what older entries are trimmed to, about or, with `exactly`, to the entry; None = never
    * `overwrite`: a batch replaces what its streams hold
    * `skip_old_ids`: rows whose id is not above the stream's last one are passed over, not an error
    """

    maxlen: int | None = None
    minid: str | None = None
    exactly: bool = False
    overwrite: bool = False
    skip_old_ids: bool = False

    @property
    def trim(self) -> tuple[str, str, str]:
        """For the script: by what, how, and how far."""
        how = "=" if self.exactly else "~"
        if self.maxlen is not None:
            return "MAXLEN", how, str(self.maxlen)
        return ("MINID", how, self.minid) if self.minid is not None else ("", "", "")
