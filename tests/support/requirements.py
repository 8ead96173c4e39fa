"""Programs and packages that single tests need, and that not every machine has."""

import os

import pytest


def require(found: object, lacking: str) -> None:
    """Skip the test unless what it needs was found; with CI set it fails. `lacking`: what to install, and how."""
    if not found:
        if os.environ.get("CI"):
            pytest.fail(lacking, pytrace=False)
        pytest.skip(lacking)
