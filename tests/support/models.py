"""Models that the tests of decoding and of outputs share."""

import enum
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

import msgspec
import pydantic


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 10


@dataclass
class Point:
    x: int
    y: float = 0.0


class Price(msgspec.Struct):
    amount: Decimal


class Address(pydantic.BaseModel):
    street: str
    lat: float = 0.0


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(alias="customerName", min_length=2)
    age: int | None
    born: date | None = None
    homes: list[Address] = []
    site: pydantic.AnyUrl | None = None
    colour: Colour = Colour.RED


def pairs(**values: str | bytes) -> list[bytes]:
    """The fields of an entry."""
    flat = []
    for name, value in values.items():
        flat += [name.encode(), value.encode() if isinstance(value, str) else value]
    return flat
