"""The contract's handlers as an app, for worker processes to import."""

from millstream.testing.contract import app_of
from millstream.testing.contract_cases import CASES
from tests.contract.pydantic_case import PYDANTIC

ALL = (*CASES, PYDANTIC)

app = app_of(ALL)
