"""Publishing: one message or many, each once although replies may be lost (idempotent producers, Kafka KIP-98)."""

from typing import TYPE_CHECKING

from millstream.lazy import lazy_names

if TYPE_CHECKING:
    from millstream.producer.producer import Producer
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "millstream.producer.producer": ("Producer",),
        },
    )

__all__ = ["Producer"]
