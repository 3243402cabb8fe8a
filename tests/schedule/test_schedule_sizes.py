"""The five numbers."""

from __future__ import annotations

import pytest

from cdp_repro.schedule.sizes import Sizes


def test_products_are_named():
    sizes = Sizes(stages=12, workers=3, accumulate=4, replicas=2, pipeline_ranks=6)
    assert (sizes.lanes, sizes.turns, sizes.micro_batches) == (6, 12, 24)
    sizes.check()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0, 1), "stages=0: at least 1"), ((1, 0), "workers=0: at least 1"), ((1, 1, 0), "accumulate=0: at least 1"),
        ((1, 1, 1, 0), "replicas=0: at least 1"),
        ((6, 2, 1, 1, 4), "ranks=4 do not share stages=6 equally: use ranks=1, 2, 3, 6"),
        ((6, 2, 1, 1, 0), "use ranks=1, 2, 3, 6"),
    ],
)  # fmt: skip
def test_refusals_name_a_value_that_works(values, said):
    with pytest.raises(ValueError, match=said):
        Sizes(*values).check()
