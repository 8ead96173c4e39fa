"""WriteOptions: trimming, overwriting and existing ids of the streams that a sink writes to."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How a sink writes to streams.

    * `maxlen`, `minid`: trim streams to this length or id, approximately or, with `exact`, exactly; None = never
    * `overwrite`: a batch replaces the entries of its streams
    * `skip_existing_ids`: skip rows whose id is not above the stream's last one; else they are an error
    """

    maxlen: int | None = None
    minid: str | None = None
    exact: bool = False
    overwrite: bool = False
    skip_existing_ids: bool = False

    @property
    def trim_args(self) -> tuple[str, str, str]:
        """The arguments of XTRIM: strategy, operator and threshold; "" for no trimming."""
        how = "=" if self.exact else "~"
        if self.maxlen is not None:
            return "MAXLEN", how, str(self.maxlen)
        return ("MINID", how, self.minid) if self.minid is not None else ("", "", "")
