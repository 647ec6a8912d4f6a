"""Steps and epochs are Transformers': micro-batches count, the last window of an epoch may be short."""

import pytest

from jaxtrl.rows.order import BatchSizes, DataPosition
from jaxtrl.trainers.extent import Extent


@pytest.mark.parametrize(
    ("count", "steps", "positions", "expected"),
    [
        (8, 8, [(0, 2), (0, 6), (1, 0), (1, 4)], [0.25, 0.75, 1.0, 1.5]),
        (10, 3, [(0, 4), (0, 8), (1, 0)], [2 / 5, 4 / 5, 1.0]),
        (9, 3, [(0, 4), (0, 8), (1, 0)], [2 / 5, 4 / 5, 1.0]),
    ],
)
def test_epoch(count, steps, positions, expected):
    extent = Extent(BatchSizes(2, 1, 1 if count == 8 else 2), count, steps)
    assert [extent.epoch_at(DataPosition(*position)) for position in positions] == pytest.approx(expected)


def test_epochs_entered():
    sizes = BatchSizes(2, 2, 2)
    assert [Extent(sizes, 20, steps).epochs for steps in (1, 3, 4, 7)] == [1, 1, 2, 3]


def test_a_stream_is_one_epoch():
    extent = Extent(BatchSizes(2, 1, 2), None, 10)
    assert extent.epochs == 1
    assert extent.epoch_at(DataPosition(0, 20)) == 0.5
