"""The systems of the field: on real ranks bitwise what one device computes, and each what its rule says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from reference import SGD
from reference import train as reference_train
from small_runs import check_same, flat, make_batches, make_engine, mixed_stages, ranks_of, same, train, train_each
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule, add_mode, add_timeline
from cdp_repro.schedule.rules import Fresh
from cdp_repro.schedule.timelines.ordered import ZeroBubble

SYNCHRONOUS = {
    2: [
        ("naive", 3, 4, {}),
        ("gpipe", 3, 4, {}),
        ("one_f_one_b", 3, 4, {}),
        ("interleaved", 4, 4, {}),
        ("interleaved", 2, 8, {"accumulate": 2}),
        ("zero_bubble", 3, 4, {}),
        ("zero_bubble", 1, 2, {"accumulate": 3}),
        ("chimera", 2, 2, {}),
        ("chimera", 4, 2, {"accumulate": 2}),
    ],
    4: [
        ("interleaved", 4, 8, {}),
        ("zero_bubble", 5, 8, {}),
        ("chimera", 4, 4, {}),
        ("chimera", 2, 4, {"accumulate": 3, "slot_order": "backward_first"}),
    ],
}
"""By D: mode, N, S, choices."""

ASYNCHRONOUS = {
    2: [("pipedream", 2, 2, {}), ("ampnet", 2, 2, {}), ("pipedream", 2, 4, {}), ("ampnet", 2, 4, {})],
    4: [("pipedream", 4, 4, {}), ("ampnet", 4, 4, {}), ("pipedream_2bw", 4, 4, {"accumulate": 2}),
        ("pipedream", 2, 2, {"replicas": 2}), ("ampnet", 2, 2, {"replicas": 2})],
}  # fmt: skip


def runs(cases, ranks, folder, pieces):
    listed = []
    for mode, n, s, choices in cases:
        d = ranks // choices.get("replicas", 1)
        listed.append(((mode, "pipeline", n, s, pieces), {**choices, "ranks": d if n != d else None}))
    assert {ranks_of(*arguments[:4], **choices) for arguments, choices in listed} == {ranks}
    found = run_ranks(train_each, ranks, listed, folder=folder)
    return [[each[number] for each in found] for number in range(len(cases))]


class Anywhere(ZeroBubble):
    """Backwards in two parts, on any placement."""

    name = "anywhere"
    placements = None


def train_anywhere():
    add_timeline(Anywhere)
    add_mode("anywhere", "anywhere", Fresh)
    return train("anywhere", "zero", 3, 2)


def test_a_rank_that_holds_no_stage_ends_its_steps_where_backwards_are_in_two_parts(tmp_path):
    check_same(run_ranks(train_anywhere, 3, folder=tmp_path), train("dp", "single_device", 3, 2))


@pytest.mark.parametrize("ranks", SYNCHRONOUS)
def test_synchronous_systems_compute_what_data_parallelism_does_on_one_device(tmp_path, ranks):
    for (mode, n, s, choices), outcomes in zip(
        SYNCHRONOUS[ranks], runs(SYNCHRONOUS[ranks], ranks, tmp_path, (3, 2)), strict=True
    ):
        choices = {key: value for key, value in choices.items() if key != "slot_order"}
        losses, model, state, reads = train("dp", "single_device", n, s, **choices)
        check_same(outcomes, (losses, model, state, reads))
        assert train(mode, "single_device", n, s, **choices)[0] == losses


@pytest.mark.parametrize("ranks", ASYNCHRONOUS)
def test_asynchronous_systems_compute_on_ranks_what_they_do_on_one_device(tmp_path, ranks):
    for (mode, n, s, choices), outcomes in zip(
        ASYNCHRONOUS[ranks], runs(ASYNCHRONOUS[ranks], ranks, tmp_path, (7, 1, 4)), strict=True
    ):
        check_same(outcomes, train(mode, "single_device", n, s, (7, 1, 4), **choices))


# ---------------------------------------------------------------------------------------------- versions, naively


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize(("n", "c"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_pipedream_is_sgd_with_each_stage_as_late_as_stages_follow(n, c):
    stages, batches = [s.double() for s in mixed_stages(n * c)], make_batches(20, 1)
    stages = [nn.Sequential(*(p for p in stage if not isinstance(p, nn.Dropout))) for stage in stages]
    late = [[-(-(n * c - j) // c) - 1 for j in range(n * c)]]
    expected = reference_train(
        copy.deepcopy(stages), F.cross_entropy, SGD(0.1, momentum=0.9, weight_decay=0.01), late, 1, batches
    )
    engine = Engine(stages, F.cross_entropy, sgd, "pipedream", workers=n)
    done = 0
    for piece in (7, 1, 12):
        for result in engine.run(batches[done : done + piece]):
            assert result.losses == pytest.approx(expected.losses[done], abs=1e-12)
            done += 1
        for name, parameter in engine.model().named_parameters():
            torch.testing.assert_close(parameter.detach(), expected.thetas[done][name], rtol=0, atol=1e-12)


def linear_tanh(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def ampnet(stages, batches):
    """AMPNet by hand: tanh(x W' + b) forward with W of s-1-j updates before, backward with the newest W."""
    count = len(stages)
    thetas = [[[stage[0].weight.detach().clone(), stage[0].bias.detach().clone()]] for stage in stages]
    momenta = [[torch.zeros_like(tensor) for tensor in theta[0]] for theta in thetas]
    losses = []
    for t, (inputs, targets) in enumerate(batches):
        kept, x = [], inputs
        for j in range(count):
            weight, bias = thetas[j][max(0, t - (count - 1 - j))]
            y = torch.tanh(x @ weight.T + bias)
            kept.append((x, y))
            x = y
        losses.append(F.cross_entropy(x, targets).item())
        gradient = (torch.softmax(x, 1) - F.one_hot(targets, 5)) / len(targets)
        for j in reversed(range(count)):
            weight, bias = thetas[j][t]
            x, y = kept[j]
            gradient = gradient * (1 - y**2)
            gradients = gradient.T @ x, gradient.sum(0)
            gradient = gradient @ weight
            new = []
            for place, (tensor, g) in enumerate(zip((weight, bias), gradients, strict=True)):
                momentum = 0.9 * momenta[j][place] + g + 0.01 * tensor
                momenta[j][place] = momentum
                new.append(tensor - 0.1 * momentum)
            thetas[j].append(new)
    return losses, [theta[-1] for theta in thetas]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ampnet_goes_back_through_newer_weights_with_the_inputs_that_its_forward_saved(n):
    batches = make_batches(20, 1)
    losses, thetas = ampnet(linear_tanh(n), batches)
    engine = Engine(linear_tanh(n), F.cross_entropy, sgd, "ampnet", workers=n)
    found = [result.losses[0] for piece in (batches[:7], batches[7:8], batches[8:]) for result in engine.run(piece)]
    assert found == pytest.approx(losses, abs=1e-12)
    for stage, (weight, bias) in zip(engine.model(), thetas, strict=True):
        torch.testing.assert_close(stage[0].weight.detach(), weight, rtol=0, atol=1e-12)
        torch.testing.assert_close(stage[0].bias.detach(), bias, rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------- beside torch's schedules

LIBRARY = {
    "gpipe": (ScheduleGPipe, 1),
    "one_f_one_b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2),
}
RANKS, MICRO = 2, 4


def plain_stages(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh()).double() for _ in range(count)]


def travelling(has_gradient):
    """What goes from one stage to the next, without values."""
    return torch.empty(3, 5, dtype=torch.float64, device="meta").requires_grad_(has_gradient)


def library_gradients(name, rank):
    """One mini-batch through a schedule of torch; the parameters' gradients of this rank's stages, by stage."""
    kind, chunks = LIBRARY[name]
    modules = plain_stages(RANKS * chunks)
    ((inputs, targets),) = make_batches(1, MICRO)
    own = list(range(rank, RANKS * chunks, RANKS))
    stages = [
        PipelineStage(
            modules[j],
            j,
            RANKS * chunks,
            torch.device("cpu"),
            input_args=travelling(j > 0),
            output_args=travelling(True),
        )
        for j in own
    ]
    schedule = kind(stages if chunks > 1 else stages[0], MICRO, F.cross_entropy, scale_grads=True)
    first, last = rank == 0, rank == RANKS - 1
    schedule.step(*([inputs] if first else []), target=targets if last else None)
    return {j: [parameter.grad.clone() for parameter in modules[j].parameters()] for j in own}


def one_step_on_a_rank(name):
    rank = torch.distributed.get_rank()
    theirs = library_gradients(name, rank)
    _, chunks = LIBRARY[name]
    engine = Engine(
        plain_stages(RANKS * chunks), F.cross_entropy, lambda params: torch.optim.SGD(params, lr=1.0),
        name, "pipeline", workers=MICRO, ranks=RANKS,
    )  # fmt: skip
    for _ in engine.run(make_batches(1, MICRO)):
        pass
    after = [[parameter.detach().clone() for parameter in stage.parameters()] for stage in engine.model()]
    return theirs, after


@pytest.mark.parametrize("name", LIBRARY)
def test_a_step_is_that_of_the_library(tmp_path, name):
    found = run_ranks(one_step_on_a_rank, RANKS, name, folder=tmp_path)
    chunks = LIBRARY[name][1]
    before = [[p.detach() for p in stage.parameters()] for stage in plain_stages(RANKS * chunks)]
    compared = 0
    for theirs, after in found:
        for j, gradients in theirs.items():
            for old, new, gradient in zip(before[j], after[j], gradients, strict=True):
                torch.testing.assert_close(old - new, gradient, rtol=0, atol=1e-9)
                compared += 1
    assert compared == 4 * RANKS * chunks


# ---------------------------------------------------------------------------------------------- a backward in parts


class Tangled(nn.Module):
    """A weight that is used twice, one that is used beside the way of the input, one that is not used at all."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, x):
        gate = torch.sigmoid(self.scale).exp()
        h = self.norm(torch.tanh(x @ self.twice) * gate)
        return h @ self.twice.T + x


def tangled_stages(count):
    torch.manual_seed(0)
    return [Tangled() for _ in range(count)]


def test_a_backward_in_two_parts_gives_the_same_gradients_whatever_the_graph_of_a_stage():
    whole = train("one_f_one_b", "single_device", 2, 3, stages=tangled_stages)
    parts = train("zero_bubble", "single_device", 2, 3, stages=tangled_stages)
    assert parts[0] == whole[0]
    same(parts[1], whole[1])
    same(parts[2], whole[2])


# ------------------------------------------------------------------------------------------ executed is simulated

TRACED = [("naive", 2, 2), ("gpipe", 3, 2), ("interleaved", 2, 4), ("zero_bubble", 3, 2), ("chimera", 2, 2),
          ("pipedream", 2, 2), ("ampnet", 2, 2)]  # fmt: skip
TRACED_STEPS = 3


def traced(cases):
    found = []
    for mode, n, s in cases:
        ranks = {"ranks": 2} if n != 2 else {}
        engine = Engine(
            linear_tanh(s), F.cross_entropy, sgd, mode, "pipeline", workers=n, traced_steps=TRACED_STEPS + 4, **ranks
        )
        for _ in engine.run(make_batches(TRACED_STEPS, engine.schedule.micro_batches)):
            pass
        found.append(engine.trace())
    return found


def test_bytes_versions_messages_and_idle_slots_are_those_of_the_simulation(tmp_path):
    executed = run_ranks(traced, 2, TRACED, folder=tmp_path)[0]
    for (mode, n, s), trace in zip(TRACED, executed, strict=True):
        ranks = {"ranks": 2} if n != 2 else {}
        schedule = Schedule.build(mode, n, s, "pipeline", **ranks)
        ((inputs, targets),) = make_batches(1, 1)
        costs = profile_stages(Network(linear_tanh(s), F.cross_entropy), inputs, targets)
        simulated = simulate(Program(schedule), costs, TRACED_STEPS)
        assert trace.records == simulated.records, mode
        assert trace.messages == simulated.messages, mode
        assert trace.idle_share(schedule.slots_per_step) == simulated.idle_share(schedule.slots_per_step)


# --------------------------------------------------------------------------------------------------------- resumed


@pytest.mark.parametrize("mode", ["zero_bubble", "chimera", "interleaved", "pipedream", "ampnet"])
def test_a_checkpoint_in_the_middle_changes_nothing(mode):
    batches = make_batches(9, 4 if mode not in ("pipedream", "ampnet") else 1)
    whole, first, second = (make_engine(mode, "single_device", 4, 4) for _ in range(3))
    losses = [result.losses for result in whole.run(batches)]
    found = [result.losses for result in first.run(batches[:4])]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    found += [result.losses for result in second.run(batches[4:])]
    assert found == losses
    same(flat(second.state_dict()), flat(whole.state_dict()))
