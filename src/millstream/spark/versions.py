"""What differs between the versions of Spark that millstream runs on. Nothing else asks for a version.

`docs/spark-versions.md` tells users what each version lacks.
"""

import pyspark

SPARK_VERSION: str = pyspark.__version__

SUPPORTED = "4.2 and 4.3"
"""The versions that the tests pass on, as errors name them."""

_VERSION = tuple(int(part) for part in SPARK_VERSION.split(".")[:2])

_STREAMING = "org.apache.spark.sql.execution.streaming."

LOCAL_CHECKPOINTS = (
    _STREAMING + ("" if _VERSION < (4, 1) else "checkpointing.") + "FileSystemBasedCheckpointFileManager"
)
"""The class that writes checkpoints on a local disk without help of other programs; 4.1 has moved it.

By default Spark writes them through Hadoop's FileContext, which starts the program `readlink` for each file that it
renames: some 35 processes and 50 ms a batch (Hadoop, FileUtil.readLink). Both overwrite a file by one rename.
"""
