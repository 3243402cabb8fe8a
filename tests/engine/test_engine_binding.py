"""Binding is what torch.func.functional_call is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from cdp_repro.engine.binding import Binding


class Net(nn.Module):
    """Nested, with a tied weight, BatchNorm's buffers changed in place and one buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.inner[1].weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.inner(self.first(x))


def tensors(module):
    generator = torch.Generator().manual_seed(1)
    parameters = {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}
    return parameters, {name: buffer.clone() + 1 for name, buffer in module.named_buffers()}


def test_it_computes_what_functional_call_computes_and_leaves_the_module_as_it_was():
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    own = dict(net.named_parameters())
    parameters, buffers = tensors(net)
    _, expected_buffers = tensors(net)
    x = torch.randn(6, 4)
    merged = {**parameters, **expected_buffers}
    expected = functional_call(net, merged, (x,))
    with Binding(net).bound(parameters, buffers):
        output = net(x)
    assert torch.equal(output, expected)
    assert all(torch.equal(buffers[name], merged[name]) for name in buffers)
    assert buffers["calls"] == 2 and buffers["inner.0.num_batches_tracked"] == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter is own[name] for name, parameter in net.named_parameters())


def test_the_module_is_as_it_was_after_an_error():
    net = Net()
    own = dict(net.named_parameters())
    parameters, buffers = tensors(net)
    with pytest.raises(RuntimeError), Binding(net).bound(parameters, buffers):
        net(torch.randn(6, 5))
    assert all(parameter is own[name] for name, parameter in net.named_parameters())
