"""The settings of a Spark session that depend on where it runs and where its checkpoints are."""

import pytest

from millstream.spark.run.session import default_settings

pytestmark = pytest.mark.spark

MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


@pytest.mark.parametrize(
    ("master", "checkpoint", "is_local"),
    [
        ("local[*,4]", "", True),
        ("local[2]", "/var/lib/checkpoints", True),
        ("local[2]", "s3a://bucket/checkpoints", False),
        ("yarn", "/checkpoints", False),
        ("spark://host:7077", "hdfs://host/checkpoints", False),
        ("local-cluster[2,1,1024]", "/checkpoints", False),
    ],
)
def test_only_checkpoints_on_this_machine_are_written_without_other_programs(
    master: str, checkpoint: str, is_local: bool
) -> None:
    chosen = default_settings(master, checkpoint).get(MANAGER, "")
    assert chosen.endswith(".FileSystemBasedCheckpointFileManager") is is_local
