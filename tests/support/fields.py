"""Fields of entries, and other replies that alternate names and values, as text."""

from collections.abc import Sequence

from millstream.redis_client.replies import pairs_of


def text_fields(items: Sequence[bytes]) -> dict[str, str]:
    """Names and values as text."""
    return {name.decode(): value.decode() for name, value in pairs_of(items)}
