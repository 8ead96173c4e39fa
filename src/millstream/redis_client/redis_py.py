"""Imports redis-py without the SDK of OpenTelemetry, which it would load, where that is installed, for an annotation.

That is a tenth of a second at the start of each process. redis-py's own metrics work as before: they import the SDK
when they are switched on.
"""

import sys

_SDK = "opentelemetry.sdk.metrics"

if "redis" not in sys.modules and _SDK not in sys.modules:
    sys.modules[_SDK] = None  # type: ignore[assignment] # an import of it fails, as if it were not installed
    try:
        import redis  # noqa: F401
    finally:
        del sys.modules[_SDK]
