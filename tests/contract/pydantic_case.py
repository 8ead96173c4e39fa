"""A case of one's own, as the users of another model library would write it."""

from typing import Any

from pydantic import BaseModel

from millstream.testing.contract_cases import model_case


class AsPydantic(BaseModel):
    n: int
    tags: list[str]
    note: str | None = None


def pydantic_model(model: AsPydantic) -> dict[str, Any]:
    return {"next": model.n + 1, "tags": len(model.tags), "note": repr(model.note)}


PYDANTIC = model_case(
    "pydantic_model", "a pydantic model is decoded from the fields, or the message is a dead letter", pydantic_model
)
