"""What a message looks like in memory."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import make_batches, make_engine
from torch import nn

from cdp_repro import Engine
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


class Batch:
    """A mini-batch whose parts are of any kind."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets


def tokens(micro_batch):
    return torch.randint(5, (3, 4), generator=torch.Generator().manual_seed(micro_batch))


def weighted(micro_batch):
    generator = torch.Generator().manual_seed(10 + micro_batch)
    return {"classes": torch.randint(4, (3,), generator=generator), "weights": [torch.rand(3, generator=generator)]}


class FewerAtTimes(nn.Module):
    """Leaves its layer out of every second forward that computes something."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, inputs):
        self.calls += not inputs.is_meta
        return inputs if self.calls % 2 else self.layer(inputs)


class Balanced(nn.Module):
    """Leaves a term of the loss behind, as layers with several experts do."""

    def __init__(self):
        super().__init__()
        self.layer, self.term = nn.Linear(6, 4), None

    def forward(self, inputs):
        self.term = inputs.square().mean()
        return self.layer(inputs)


def of_weights(output, targets):
    losses = F.cross_entropy(output, targets["classes"], reduction="none")
    return (losses * targets["weights"][0]).mean()


def run_on(placement, kind):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Embedding(5, 6, sparse=kind == "sparse"), nn.Flatten(), nn.Linear(24, 6))
    last = {"fewer": lambda: nn.Sequential(FewerAtTimes(), nn.Linear(6, 4)), "term": Balanced}
    stages = [first, last.get(kind, lambda: nn.Linear(6, 4))()]
    loss = (lambda output, targets: of_weights(output, targets) + stages[1].term) if kind == "term" else of_weights
    if kind == "none":
        loss = lambda output, targets: output.square().mean() if targets is None else 0 / 0  # noqa: E731
    inputs = (lambda m: {"tokens": tokens(m)}) if kind == "inputs" else tokens
    targets = (lambda m: None) if kind == "none" else weighted
    engine = Engine(stages, loss, lambda p: torch.optim.SGD(p, lr=0.1), "cdp_v2", placement, workers=2)
    losses = [result.losses for result in engine.run([Batch(inputs, targets)] * 3)]
    return losses, [tensor.clone() for tensor in engine.model().state_dict().values()]


@pytest.mark.parametrize("kind", ["targets", "none"])
@pytest.mark.parametrize("placement", ["replicated", "pipeline"])
def test_targets_are_whatever_the_loss_takes(tmp_path, placement, kind):
    losses, tensors = run_on("single_device", kind)
    found = run_ranks(run_on, 2, placement, kind, folder=tmp_path)
    assert found[0][0] == losses
    assert all(map(torch.equal, tensors, found[0][1]))


def refused_on(placement, kind):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as refused:
        run_on(placement, kind)
    if dist.is_initialized():
        dist.barrier()
    return f"{refused.type.__name__}: " + "\n".join([str(refused.value), *getattr(refused.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("inputs", r"ValueError: inputs\(micro_batch\) gave a dict, not one tensor \[B/M, ...\]: put together"),
        ("sparse", r"ValueError: the gradient of 0.weight is torch.sparse_coo, (.|\n)* leave sparse=True out"),
        ("term", r"TypeError: (.|\n)*copies of all stages, and loss_fn, run once on tensors without values"),
    ],
)
def test_what_cannot_be_sent_or_known_before_is_refused(tmp_path, kind, said):
    for refusal in run_ranks(refused_on, 2, "replicated", kind, folder=tmp_path):
        assert re.match(said, refusal), refusal
    if kind == "inputs":
        assert re.match(said, refused_on("single_device", kind))
    else:
        run_on("single_device", kind)


@pytest.mark.parametrize("kind", ["sparse", "fewer"])
def test_where_ranks_exchange_no_gradients_they_may_be_of_any_kind(tmp_path, kind):
    losses, tensors = run_on("single_device", kind)
    found = run_ranks(run_on, 2, "pipeline", kind, folder=tmp_path)
    assert found[0][0] == losses and all(map(torch.equal, tensors, found[0][1]))


def test_layers_that_not_every_micro_batch_uses_are_refused_with_what_works(tmp_path):
    run_on("single_device", "fewer")
    with pytest.raises(AssertionError, match=r"use every parameter in every micro-batch, if need be times 0"):
        run_ranks(run_on, 2, "replicated", "fewer", folder=tmp_path)
