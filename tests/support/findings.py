"""The findings of `millstream doctor` about what a test has put into Redis."""

from typing import Any

from millstream.admin.doctor import Diagnosis, diagnose
from millstream.admin.findings import Finding
from millstream.redis_client.client import Client


def found(diagnosis: Diagnosis, check: str) -> list[Finding]:
    """The findings of a check that are not ok."""
    return [one for one in diagnosis.findings if one.check == check and one.severity != "ok"]


def only(client: Client, check: str, **options: Any) -> Finding:
    """The one finding of a check that is not ok."""
    (one,) = found(diagnose(client, **options), check)
    return one
