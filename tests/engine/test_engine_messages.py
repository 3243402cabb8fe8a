"""What a message looks like in memory."""

from __future__ import annotations

import torch

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
