"""The settings of a Spark session that depend on where it runs and where its checkpoints are."""

import os
from pathlib import Path

import pytest

from millstream.spark.run.session import default_settings, make_private

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


def test_checkpoint_folders_are_private_whatever_the_umask_and_those_that_exist_are_left_alone(tmp_path: Path) -> None:
    there, made = tmp_path / "there", tmp_path / "there" / "checkpoints" / "app" / "handler"
    there.mkdir()
    there.chmod(0o755)
    before = os.umask(0)
    try:
        make_private(made)
        make_private(made)
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (there, made.parents[1], made.parents[0], made)] == [
        0o755,
        0o700,
        0o700,
        0o700,
    ]
