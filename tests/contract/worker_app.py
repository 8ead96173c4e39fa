"""The contract's handlers as an app, for worker processes to import."""

from millstream.testing.contract import app_of
from millstream.testing.contract_cases import CASES
from millstream.testing.contract_keys import KEY_LIST_CASES
from tests.contract.pydantic_case import PYDANTIC

ALL = (*CASES, PYDANTIC)
ON_WORKERS = (*ALL, *KEY_LIST_CASES)

app = app_of(ON_WORKERS)
