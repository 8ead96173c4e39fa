"""What would make Spark connect to a server is refused where that cannot work, whatever says it."""

import pytest

from millstream.errors import ConfigError
from millstream.spark.run.connect_guard import refuse_connect

pytestmark = [pytest.mark.spark]


@pytest.mark.parametrize(
    ("master", "conf", "environ", "message"),
    [
        ("sc://head:15002", {}, {}, "--spark-master sc://head:15002: handlers and stages need"),
        ("local[*]", {"spark.remote": "sc://head"}, {}, "drop it, and name the cluster by --spark-master"),
        ("local[*]", {"spark.api.mode": "Connect"}, {}, "drop it, or set it to classic"),
        ("local[*]", {}, {"SPARK_API_MODE": "connect"}, "drop it, or set it to classic"),
        ("local[*]", {}, {"SPARK_REMOTE": "sc://head"}, "the variable SPARK_REMOTE is set"),
        ("local[*]", {}, {"SPARK_CONNECT_MODE_ENABLED": "1"}, "unset it, and name the cluster by --spark-master"),
    ],
)
def test_each_way_to_ask_for_spark_connect_is_refused(
    master: str, conf: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_connect(master, conf, environ)
    assert message in str(refusal.value)


def test_settings_of_a_classic_session_are_not_refused() -> None:
    refuse_connect("spark://head:7077", {"spark.api.mode": "classic"}, {"SPARK_API_MODE": "connect"})
