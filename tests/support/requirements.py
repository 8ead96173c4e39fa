"""Programs that single tests need, and that not every machine has."""

import pytest


def skip_without(found: object, lacking: str) -> None:
    """Skip the test unless what it needs was found. `lacking`: what to install, and how.

    What all tests need, a Redis and a Java, is no case for this: `scripts/setup` installs it or fails.
    """
    if not found:
        pytest.skip(lacking)
