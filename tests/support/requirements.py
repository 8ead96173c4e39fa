"""Programs that single tests need, and that not every machine has."""


def skip_without(found: object, lacking: str) -> None:
    """Skip the test unless what it needs was found. `lacking`: what to install, and how.

    What all tests need, a Redis and a Java, is no case for this: `scripts/setup` installs it or fails.
    """
    if not found:
        import pytest  # the programs of tests, which share modules with them, need none

        pytest.skip(lacking)
