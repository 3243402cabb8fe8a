"""Shards: any tensors, cut for any number of ranks and joined again; optimizers' states with them; real ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.parameters import StageState
from cdp_repro.engine.shards import Shards
from cdp_repro.predict.costs import StageCosts
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.values import Kind

CPU = torch.device("cpu")
TYPES = (torch.float64, torch.float32, torch.bfloat16)


def parameter(shape, dtype, requires_grad):
    values = torch.randn(shape).to(dtype)
    dense = values.to(memory_format=torch.channels_last) if len(shape) == 4 else values
    return nn.Parameter(dense, requires_grad)


@given(
    ranks=st.integers(1, 9),
    kinds=st.lists(
        st.tuples(
            st.sampled_from([(), (1,), (3,), (7, 5), (2, 3, 5), (2, 3, 4, 4), (0,)]),
            st.sampled_from(TYPES),
            st.booleans(),
        ),
        max_size=6,
    ),
)
@settings(deadline=None)
def test_pieces_of_all_ranks_make_the_whole(ranks, kinds):
    tensors = {f"p{number}": parameter(*kind) for number, kind in enumerate(kinds)}
    shards = [Shards(tensors, rank, ranks, CPU) for rank in range(ranks)]
    pieces = [shard.pieces(tensors) for shard in shards]
    for name, tensor in tensors.items():
        assert all(piece[name].shape[1:] == (1,) * (tensor.dim() - 1) for piece in pieces)
        assert sum(piece[name].numel() for piece in pieces) == tensor.numel()
    joined = shards[0].joined(pieces)
    assert joined.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(joined[name], tensor)
        assert joined[name].stride() == tensor.stride()
    some = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    assert all(torch.equal(shards[0].pieces(some)[name], pieces[0][name]) for name in some)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_holds_as_many_bytes_as_predicted(ranks):
    tensors = {name: parameter(shape, torch.float32, True) for name, shape in (("a", (7, 5)), ("b", (3,)))}
    program = Program(Schedule.build("dp", ranks, placement="zero", collectives=True))
    costs = StageCosts.equal(ranks, parameter_bytes=4 * 38)
    held = [
        sum(piece.nbytes for piece in Shards(tensors, rank, ranks, CPU).pieces(tensors).values())
        for rank in range(ranks)
    ]
    of_stage = [
        [v for v in program.schedule.held_after(0)[rank] if (v.kind, v.stage) == (Kind.PARAMETERS, 0)]
        for rank in range(ranks)
    ]
    assert [[costs.bytes_of(value) for value in values] for values in of_stage] == [[size] for size in held]
    assert sum(held) == 4 * 38


def grouped(parameters):
    """Matrices with weight decay, all else without: the usual groups, not in the order of the parameters."""
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.1)


OPTIMIZERS = {
    "adamw": grouped,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_of_shards_are_those_of_the_whole(optimizer):
    """The state of a whole stage is cut after one update, each part updated, and joined."""
    torch.manual_seed(0)
    tensors = {
        "bias": parameter((5,), torch.float64, True),
        "scale": parameter((), torch.float64, True),
        "weight": parameter((5, 4), torch.float64, True),
        "frozen": parameter((3,), torch.float64, False),
    }
    gradients = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in tensors.items() if p.requires_grad}
    everywhere = [Shards(tensors, rank, 3, CPU) for rank in range(3)]
    parts = []
    for shards in everywhere:
        pieces = {name: nn.Parameter(p, tensors[name].requires_grad) for name, p in shards.pieces(tensors).items()}
        parts.append(StageState(pieces, optimizer))
    whole = StageState(tensors, optimizer)

    def update(state, version, gradients):
        return state.update(version, {name: gradient.clone() for name, gradient in gradients.items()}, 1.0)

    first = update(whole, whole.newest(0), gradients)
    before = copy.deepcopy(whole.state_dict({1: first}))
    states = []
    for shards, part in zip(everywhere, parts, strict=True):
        loaded = part.load_state_dict(shards.cut_state(before, part.optimized))
        states.append(part.state_dict({2: update(part, loaded[1], shards.pieces(gradients))}))
    expected = whole.state_dict({2: update(whole, first, gradients)})
    joined = everywhere[0].join_states(states, parts[0].optimized)
    assert joined["versions"].keys() == expected["versions"].keys() == {2}
    for name, tensor in expected["versions"][2].items():
        assert torch.equal(joined["versions"][2][name], tensor), name
    assert joined["optimizer"]["class"] == expected["optimizer"]["class"]
    mine, theirs = (state["optimizer"]["state"] for state in (joined, expected))
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entry in theirs["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(mine["state"][index][key]), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("rank", range(3))
def test_the_optimizer_groups_pieces_as_it_groups_parameters(rank):
    """By identity and by size, as usual: on every rank the same."""
    layer = nn.Linear(40, 3)
    biases = {id(layer.bias)}

    def make(parameters):
        plain = [p for p in parameters if id(p) in biases or p.numel() < 10]
        return torch.optim.SGD([{"params": plain}, {"params": [p for p in parameters if p not in {*plain}]}], lr=0.1)

    tensors = dict(layer.named_parameters())
    shards = Shards(tensors, rank, 3, CPU)
    pieces = {name: nn.Parameter(piece) for name, piece in shards.pieces(tensors).items()}
    state = StageState(pieces, shards.optimizer(make, [*tensors.values()]))
    assert state.optimized == ["bias", "weight"]
    assert state.optimized == StageState(tensors, make).optimized


def test_an_optimizer_with_values_from_the_start_is_refused():
    tensors = {"weight": parameter((4, 2), torch.float32, True)}
    make = Shards(tensors, 0, 2, CPU).optimizer(torch.optim.Adagrad, [*tensors.values()])
    with pytest.raises(ValueError, match=r"Adagrad keeps values .* use collectives=False"):
        make([nn.Parameter(torch.zeros(4))])


def test_values_of_another_type_than_the_parameters_stay_as_they_are():
    tensors = {"weight": parameter((5, 3), torch.bfloat16, True)}
    moment = {"weight": torch.randn(5, 3)}
    everywhere = [Shards(tensors, rank, 2, CPU) for rank in range(2)]
    joined = everywhere[0].joined([shards.pieces(moment) for shards in everywhere])
    assert torch.equal(joined["weight"], moment["weight"])


@pytest.mark.parametrize("name", ["mu", "eta", "momentum"])
def test_what_an_optimizer_keeps_of_each_value_is_cut_whatever_its_name(name):
    """Some of torch's optimizers keep numbers under the first two names."""
    tensors = {"weight": parameter((5, 3), torch.float64, True), "scale": parameter((), torch.float64, True)}
    kept = {0: {name: torch.randn(5, 3, dtype=torch.float64)}, 1: {name: torch.tensor(0.5, dtype=torch.float64)}}
    optimizer = {"class": "Any", "state": {"state": kept, "param_groups": []}}
    state = {"versions": {0: {each: p.detach() for each, p in tensors.items()}}, "optimizer": optimizer}
    everywhere = [Shards(tensors, rank, 2, CPU) for rank in range(2)]
    parts = [shards.cut_state(state, ["weight", "scale"]) for shards in everywhere]
    assert parts[0]["optimizer"]["state"]["state"][0][name].shape[1:] == (1,)
    joined = everywhere[0].join_states(parts, ["weight", "scale"])["optimizer"]["state"]["state"]
    assert torch.equal(joined[0][name], kept[0][name]) and torch.equal(joined[1][name], kept[1][name])


def test_a_state_of_another_model_is_refused():
    shards = Shards({"weight": parameter((4, 2), torch.float32, True)}, 0, 2, CPU)
    state = {"versions": {0: {"weight": torch.zeros(4, 3)}}, "optimizer": {"class": None, "state": None}}
    with pytest.raises(ValueError, match="another model"):
        shards.cut_state(state, [])


class Mixed(nn.Module):
    """Two types, a parameter that takes no gradient, one that the loss does not depend on, and one value."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double(), nn.Linear(5, 5)
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        return self.second(torch.tanh(self.scale * self.first(inputs)).float()).double()


def trained(placement, start=None, collectives=False):
    """The state after three training steps from `start`, and the parameters of the model."""
    torch.manual_seed(0)
    engine = Engine([Mixed(), Mixed()], F.cross_entropy, grouped, "dp", placement, collectives=collectives)
    if start is not None:
        engine.load_state_dict(start)
    generator = torch.Generator().manual_seed(engine.step)
    inputs = torch.randn(3, 6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (3, 6), generator=generator)
    for _ in engine.run(zip(inputs, targets, strict=True)):
        pass
    return engine.state_dict(), {name: tensor.clone() for name, tensor in engine.model().state_dict().items()}


def test_ranks_with_shards_of_mixed_stages_go_on_from_one_device_and_one_device_from_them(tmp_path):
    """With two ranks, a sum does not depend on its order: bitwise."""
    there, _ = run_ranks(trained, 2, "zero", None, True, folder=tmp_path)[0]
    here, _ = trained("single_device")
    _, expected = trained("single_device", copy.deepcopy(here))
    onwards = run_ranks(trained, 2, "zero", here, True, folder=tmp_path)
    for _, found in [trained("single_device", copy.deepcopy(there)), *onwards]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
