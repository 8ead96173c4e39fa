"""The progress of the demo: an estimate only once there is something to estimate from."""

from io import StringIO

import pytest
from rich.console import Console

from millstream.demo.progress import ProgressView, RunProgress
from millstream.demo.report import Sample

pytestmark = [pytest.mark.spark]


@pytest.mark.parametrize(
    ("batches", "shown"),
    [
        (1, "1 batch  0 dead letters\n"),
        (2, "2 batches  0 dead letters\n"),
        (3, "3 batches  0 dead letters  33 s left\n"),
    ],
)
def test_no_time_is_estimated_before_the_third_batch(batches: int, shown: str) -> None:
    text = StringIO()
    with ProgressView(Console(file=text), 1_000) as view:
        for at_s, done in ((0.0, 0), (4.0, 108)):
            progress = RunProgress(published=1_000, done=done, dead=0, caught_up=False)
            view.show(Sample(at_s=at_s, published=1_000, done=done), progress, batches)
    assert text.getvalue().endswith(shown)
