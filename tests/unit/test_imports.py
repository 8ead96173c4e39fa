"""What is not imported at the start: a process pays for what it needs. `python -m benchmarks imports` says how much."""

import subprocess
import sys
from importlib import import_module

import pytest

pytestmark = [pytest.mark.cli]

HEAVY = ("pandas", "rich", "httpx", "prometheus_client", "wsgiref", "http.server", "matplotlib")
LAZY = (
    "millstream",
    "millstream.groups",
    "millstream.router",
    "millstream.spark.sink",
    "millstream.testing",
    "millstream.worker",
)


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("millstream", ("millstream.app", "msgspec", "redis")),
        ("millstream.cli.main", ("millstream.app", "millstream.model", "msgspec", "redis")),
        (
            "millstream.cli.worker",
            ("millstream.router.router", "millstream.balancer", "millstream.partitions.key_migration", "pyspark"),
        ),
        ("millstream.cli.worker_child", ("millstream.groups.reader", "typer", "pydantic", "pyspark")),
        (
            "millstream.cli.replay_child",
            ("redis", "millstream.delivery.reliable_stream", "typer", "pydantic", "pyspark"),
        ),
        ("millstream.worker.process.heartbeat", ("millstream.worker.loop", "msgspec", "redis")),
        ("millstream.redis_client.client", ("opentelemetry.sdk",)),
        ("millstream.spark.source.provider", ("redis", "pyarrow", "numpy", "asyncio")),
        ("millstream.spark.source.batch_planner", ("pyarrow", "numpy")),
        (
            "millstream.spark.engine.task",
            ("millstream.partitions.key_migration", "millstream.delivery.keyed_stream", "millstream.groups"),
        ),
    ],
)
def test_a_module_imports_nothing_that_only_other_modules_need(module: str, without: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted({{*{(*HEAVY, *without)!r}}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


DATACLASSES = {
    # What users write in an app, or get in it, or of consumer groups
    "groups.group.ConsumerInfo",
    "groups.group.DeletedConsumer",
    "groups.group.GroupInfo",
    "groups.pending.ClaimOptions",
    "groups.pending.PendingSummary",
    "handlers.dead_letter.DeadLetter",
    "handlers.handler.Handler",
    "handlers.key_timers.After",
    "handlers.key_timers.Cancel",
    "handlers.schedule.Schedule",
    "handlers.stage.Input",
    "handlers.stage.Rows",
    "handlers.stage.Stage",
    "model.Breaker",
    "model.Limit",
    "model.Message",
    "model.Retry",
    "worker.policy.WorkerPolicy",
    # They leave a field out of their `repr` or their comparison, or they are imported where msgspec is not
    "cli.log_output.LogSettings",
    "cli.worker_child.WorkerJob",
    "delivery.reliable_stream.Delivery",
    "handlers.attempt.RetryLater",
    "worker.context.WorkerContext",
    "worker.process.worker_process.WorkerSettings",
}


def test_a_worker_and_its_supervisor_import_few_dataclasses_as_each_takes_as_long_as_twenty_structs() -> None:
    code = """
import dataclasses, sys
import millstream.cli.worker
found = {
    f"{one.__module__}.{one.__qualname__}".removeprefix("millstream.")
    for name, module in list(sys.modules.items()) if name.startswith("millstream.")
    for one in vars(module).values() if isinstance(one, type) and dataclasses.is_dataclass(one)
}
print(*sorted(found))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == DATACLASSES, "make it a msgspec.Struct"


_COUNTED = """
import gc, sys
from millstream.cli.{module} import main
unfrozen = []
gc.callbacks.append(lambda phase, info: unfrozen.append(gc.get_freeze_count() == 0))
sys.argv[1:] = {arguments}
try: main()
except SystemExit: pass
print(sum(unfrozen), gc.isenabled(), gc.get_freeze_count() > 0)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "enabled_after"),
    [
        ("main", ["info", "--help"], True),
        ("child", ["replay_child"], False),  # it ends at once: it has no job
    ],
)
def test_a_process_collects_no_garbage_until_its_modules_are_imported_and_frozen(
    module: str, arguments: list[str], enabled_after: bool
) -> None:
    code = _COUNTED.format(module=module, arguments=arguments)
    found = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == f"0 {enabled_after} {enabled_after}"


def test_the_garbage_of_an_app_is_collected_and_its_own_setting_of_the_collector_is_kept() -> None:
    code = """
import gc, weakref
from millstream.cli.held_gc import hold_gc, release_gc
from millstream.worker.process.worker_process import tune_gc
hold_gc()
release_gc()
print(gc.isenabled(), gc.get_freeze_count() > 0)
class Loaded: pass
loaded = Loaded()
loaded.itself, alive = loaded, weakref.ref(loaded)
del loaded
gc.disable()
tune_gc()
print(gc.isenabled(), alive() is None)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "True True\nFalse True\n"


def test_metrics_of_redis_py_itself_can_still_be_switched_on() -> None:
    code = """
import millstream.redis_client.client
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from redis.observability import OTelConfig, get_observability_instance
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
get_observability_instance().init(OTelConfig())
from redis.observability.recorder import record_connection_create_time
print(get_observability_instance().is_enabled())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == ("True\n", "")


def test_a_module_of_a_package_that_was_imported_is_its_attribute() -> None:
    code = "import millstream; assert issubclass(millstream.errors.Reject, Exception)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", LAZY)
def test_a_package_has_each_name_that_it_exports_and_no_other(name: str) -> None:
    package = import_module(name)
    assert all(getattr(package, exported) is not None for exported in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Nonsense'"):
        _ = package.Nonsense
