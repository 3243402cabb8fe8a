"""Workers on clocks of their own: what a loop over the events computes, on one device and on real ranks."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import check_same, flat, make_batches, make_engine, mixed_stages, ranks_of, same, train, train_each
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.engine.delay import ErrorFeedback
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule
from cdp_repro.schedule.virtual_clock import ticks_of

sys.path.append(str(Path(__file__).parents[1] / "schedule"))
from naive_servers import pushes

MICRO = 3


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def linear_tanh(count):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def rate_factor(step):
    return 1 / (1 + step)


def by_events(model, batches, ticks, slack, size):
    """Each push by hand: the gradient at the parameters that its pull saw, over N, into one optimizer of the servers.

    The m-th push has the m-th micro-batch, and the learning rate of its training step of `size` pushes. Losses by push,
    and the parameters after each.
    """
    samples = [(x, y) for inputs, targets in batches for x, y in zip(inputs.split(MICRO), targets.split(MICRO),
                                                                    strict=True)]  # fmt: skip
    theta = [parameter.detach().clone() for parameter in model.parameters()]
    momenta, past, losses = [torch.zeros_like(each) for each in theta], [theta], []
    workers, order = len(ticks.durations), pushes(ticks, slack, len(samples))
    for push, ((_, _, _, seen), (inputs, targets)) in enumerate(zip(order, samples, strict=True)):
        for parameter, value in zip(model.parameters(), past[seen], strict=True):
            parameter.data = value.clone()
        loss = F.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        new = []
        for place, (value, gradient) in enumerate(zip(past[-1], gradients, strict=True)):
            momenta[place] = 0.9 * momenta[place] + gradient / workers + 0.01 * value
            new.append(value - 0.1 * rate_factor(push // size) * momenta[place])
        past.append(new)
    return losses, past


@pytest.mark.parametrize(
    ("mode", "speeds", "choices"),
    [
        ("async", None, {}),
        ("async", [1, 1, 2], {}),
        ("async", [2, 3, 1], {"jitter": 4}),
        ("async", [1, 1, 2], {"message_time": 0.5}),
        ("ssp", [1, 1, 2], {"slack": 0}),
        ("ssp", None, {"slack": 2}),
    ],
)
def test_each_push_is_an_update_from_what_its_pull_saw(mode, speeds, choices):
    engine = Engine(
        linear_tanh(2), F.cross_entropy, sgd, mode, workers=3, speeds=speeds, learning_rate_factor=rate_factor,
        **choices,
    )  # fmt: skip
    size, rounds = engine.schedule.micro_batches, 20 if engine.schedule.micro_batches < 10 else 4
    batches = make_batches(rounds, size, MICRO)
    slack = choices.get("slack")
    ticks = ticks_of(speeds or [1] * 3, choices.get("jitter"), choices.get("message_time", 0))
    losses, thetas = by_events(nn.Sequential(*linear_tanh(2)), batches, ticks, slack, size)
    done = 0
    for piece in (batches[:1], batches[1:3], batches[3:]):  # drained between them
        for result in engine.run(piece):
            assert result.losses == pytest.approx(losses[done * size : (done + 1) * size], abs=1e-12)
            done += 1
        for parameter, expected in zip(engine.model().parameters(), thetas[done * size], strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12)
    assert done == rounds and engine.ledger_reads == 2 * 2 * rounds * size


CASES = {
    3: [
        ("async", 2, 3, {"speeds": [1, 2]}),
        ("ssp", 2, 2, {"speeds": [1, 3], "slack": 1}),
        ("ssp", 2, 3, {"slack": 0, "jitter": 1}),
        ("async", 2, 2, {"speeds": [1, 2], "message_time": 1}),
        ("dp", 2, 3, {"speeds": [2, 1], "accumulate": 2}),
    ],
    5: [
        ("async", 3, 4, {"speeds": [1, 2, 4], "servers": 2}),
        ("ssp", 3, 4, {"speeds": [1, 1, 2], "slack": 2, "jitter": 0, "servers": 2}),
        ("async", 4, 2, {"slot_order": "backward_first"}),
    ],
}
"""By ranks: mode, N, S, choices."""


@pytest.mark.parametrize("ranks", CASES)
def test_workers_and_servers_compute_what_one_device_does(tmp_path, ranks):
    cases = [((mode, "parameter_server", n, s, (2, 1, 2)), choices) for mode, n, s, choices in CASES[ranks]]
    assert [ranks_of(*arguments[:4], **choices) for arguments, choices in cases] == [ranks] * len(cases)
    found = run_ranks(train_each, ranks, cases, folder=tmp_path)
    for number, ((mode, _, n, s, pieces), choices) in enumerate(cases):
        alone = {name: value for name, value in choices.items() if name != "servers"}
        check_same([each[number] for each in found], train(mode, "single_device", n, s, pieces, **alone))


def test_data_parallelism_computes_the_same_whatever_the_speeds():
    even, uneven = (train("dp", "single_device", 3, 2, stages=linear_tanh, speeds=s) for s in (None, [1, 3, 2]))
    assert even[0] == uneven[0]
    same(even[1], uneven[1])


@pytest.mark.parametrize(("mode", "choices"), [("async", {"speeds": [1, 1, 2]}), ("ssp", {"jitter": 2, "slack": 1})])
def test_a_checkpoint_in_the_middle_changes_nothing(mode, choices):
    whole, first, second = (make_engine(mode, "single_device", 3, 3, **choices) for _ in range(3))
    batches = make_batches(6, whole.schedule.micro_batches)
    losses = [result.losses for result in whole.run(batches)]
    found = [result.losses for result in first.run(batches[:2])]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    found += [result.losses for result in second.run(batches[2:])]
    assert found == losses
    same(flat(second.state_dict()), flat(whole.state_dict()))


def traced(cases):
    found = []
    for mode, n, s, choices in cases:
        engine = Engine(
            linear_tanh(s), F.cross_entropy, sgd, mode, "parameter_server", workers=n, traced_steps=6, **choices
        )
        for _ in engine.run(make_batches(3, engine.schedule.micro_batches)):
            pass
        found.append(engine.trace())
    return found


def test_bytes_versions_messages_and_idle_slots_are_those_of_the_simulation(tmp_path):
    executed = run_ranks(traced, 3, CASES[3], folder=tmp_path)[0]
    for (mode, n, s, choices), trace in zip(CASES[3], executed, strict=True):
        schedule = Schedule.build(mode, n, s, "parameter_server", **choices)
        ((inputs, targets),) = make_batches(1, 1)
        costs = profile_stages(Network(linear_tanh(s), F.cross_entropy), inputs, targets)
        simulated = simulate(Program(schedule), costs, 3)
        assert trace.records == simulated.records, mode
        assert trace.messages == simulated.messages, mode
        assert trace.idle_share(schedule.slots_per_step) == simulated.idle_share(schedule.slots_per_step)


def test_buffers_are_of_workers_and_averaged():
    """Worker 1 is twice as fast, so it has seen twice as many micro-batches."""
    stages = mixed_stages(1)
    engine = Engine(stages, F.cross_entropy, sgd, "async", workers=2, speeds=[1, 2])
    for _ in engine.run(make_batches(2, 3)):
        pass
    counted = engine.state_dict()["stages"][0]["buffers"]
    assert [int(each["1.num_batches_tracked"]) for each in counted] == [2, 4]


def test_what_counts_training_steps_is_refused():
    with pytest.raises(ValueError, match=r"delay=error_feedback counts training steps.*3 updates in each"):
        Engine(linear_tanh(2), F.cross_entropy, sgd, "async", workers=3, delay=ErrorFeedback)
