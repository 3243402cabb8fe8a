"""What a message looks like in memory."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from small_runs import make_batches, make_engine

from cdp_repro.engine.messages import Layout


def test_values_are_all_of_a_message_by_type():
    """As a collective adds them: a vector a type, though types of one size are mixed."""
    torch.manual_seed(0)
    shapes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.float16, "e": torch.bfloat16}
    tensors = {name: torch.randn(3, 5).to(dtype) for name, dtype in shapes.items()}
    layout = Layout.like(tensors)
    buffer = layout.pack(tensors, torch.device("cpu"))
    values = layout.values(buffer)
    assert sorted(str(each.dtype) for each in values) == sorted(map(str, set(shapes.values())))
    assert sum(each.nbytes for each in values) == layout.nbytes
    for each in values:
        each.mul_(2)
    assert all(torch.equal(view, 2 * tensors[name]) for name, view in layout.views(buffer).items())


def test_tensors_of_another_shape_are_not_packed():
    layout = Layout.like({"value": torch.zeros(4, 3)})
    for shape in ((3, 4), (1, 3), (3,)):  # the last two could be stretched to fill the message
        with pytest.raises(ValueError, match=r"where the first made \[4, 3\]: .* mini-batches of one size"):
            layout.pack({"value": torch.zeros(shape)}, torch.device("cpu"))


def of_two_sizes(placement):
    engine = make_engine("cdp_v2", placement, 2, 2)
    batches = [make_batches(1, engine.schedule.micro_batches, micro)[0] for micro in (3, 2, 4)]
    return [result.losses for result in engine.run(batches)]


def test_mini_batches_of_two_sizes_are_refused_where_activations_travel(tmp_path):
    assert len(of_two_sizes("single_device")) == 3
    with pytest.raises(AssertionError, match="mini-batches of one size; any sizes work on placement=single_device"):
        run_ranks(of_two_sizes, 2, "pipeline", folder=tmp_path)
