"""An evaluation on ranks that hold some of the stages gives, bitwise, the outputs of the whole model."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from small_runs import make_batches, make_engine, mixed_stages
from torch import nn

from cdp_repro.schedule import Schedule
from cdp_repro.schedule.forward_only import path

BATCHES, ROWS = 5, 4
SETTINGS = [
    ("gpipe", "pipeline", 2, 4, {"ranks": 2}),
    ("cdp_v2", "pipeline", 2, 4, {"ranks": 2, "replicas": 2}),
    ("interleaved", "pipeline", 2, 4, {"ranks": 2}),
    ("chimera", "pipeline", 4, 4, {}),
    ("cdp_v1", "model_parallel", 3, 3, {}),
    ("dp", "zero", 2, 2, {}),
    ("cdp_v2", "parameter_server", 2, 2, {}),
]


def samples(numbers):
    """The last batch is short."""
    inputs = torch.randn(BATCHES * ROWS - 1, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for number in numbers:
        rows = torch.arange(number * ROWS, min((number + 1) * ROWS, len(inputs)))
        yield inputs[rows], rows


def evaluate(mode, placement, n, s, choices, count=BATCHES):
    """Train, evaluate, train on; return outputs by row, the numbers that were asked for, sizes of what is held."""
    engine = make_engine(mode, placement, n, s, **choices)
    asked, rows = [], {}

    def batches(numbers):
        numbers = [*numbers]
        asked.extend(numbers)
        return samples(numbers)

    for part in range(2):
        for _ in engine.run(make_batches(2, engine.schedule.micro_batches)):
            pass
        if part == 0:
            for outputs, targets in engine.outputs(batches, count):
                rows |= dict(zip(targets.tolist(), outputs, strict=True))
            held = [sum(p.numel() for p in stage.parameters()) for stage in engine._stages]
    return rows, asked, held, {name: value.clone() for name, value in engine.model().state_dict().items()}


@pytest.mark.parametrize(("mode", "placement", "n", "s", "choices"), SETTINGS)
def test_outputs_are_those_of_one_device_and_training_goes_on(tmp_path, mode, placement, n, s, choices):
    schedule = Schedule.build(mode, n, s, placement, **choices)
    outcomes = run_ranks(evaluate, schedule.ranks, mode, placement, n, s, choices, folder=tmp_path)
    alone = {name: value for name, value in choices.items() if name == "replicas"}
    expected, _, _, model = evaluate(mode, "single_device", n, s, alone)
    assert sum(len(rows) for rows, *_ in outcomes) == len(expected) == BATCHES * ROWS - 1
    for rows, *_ in outcomes:
        assert all(torch.equal(output, expected[row]) for row, output in rows.items())
    assert sorted(number for _, asked, *_ in outcomes for number in asked) == [*range(BATCHES)], "each is read once"
    for *_, theirs in outcomes:
        assert all(torch.equal(theirs[name], value) for name, value in model.items())


def outputs_in_bfloat16(placement):
    torch.manual_seed(0)
    stages = [nn.Linear(5, 5), nn.Linear(5, 5)]
    engine = make_engine("gpipe", placement, 2, 2, lambda _: stages, autocast=bfloat16)
    for _ in engine.run([(inputs.float(), targets) for inputs, targets in make_batches(1, 2)]):
        pass
    batches = [(inputs.float(), rows) for inputs, rows in samples(range(BATCHES))]
    found = [*engine.outputs(lambda numbers: [batches[number] for number in numbers], BATCHES)]
    model = engine.model()
    with torch.no_grad(), bfloat16():
        return found, [model(inputs) for inputs, _ in batches]


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def test_an_evaluation_runs_in_the_context_of_the_forwards(tmp_path):
    _, (piped, _) = run_ranks(outputs_in_bfloat16, 2, "pipeline", folder=tmp_path)
    for found, expected in (outputs_in_bfloat16("single_device"), (piped, outputs_in_bfloat16("single_device")[1])):
        assert len(found) == BATCHES
        for (output, _), wanted in zip(found, expected, strict=True):
            assert output.dtype == torch.bfloat16 and torch.equal(output, wanted)


class Noisy(nn.Module):
    """Uses one of its parameters only in training."""

    def __init__(self):
        super().__init__()
        self.a, self.noise = nn.Linear(5, 5).double(), nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        return self.a(x) * self.noise if self.training else self.a(x)


def noisy_stages(count):
    _, *others = mixed_stages(count)  # sets the seed
    return [Noisy(), *others]


def train_noisy(placement, evaluates):
    engine = make_engine("cdp_v2", placement, 2, 2, stages=noisy_stages)
    if evaluates:
        for _ in engine.outputs(samples, BATCHES):
            pass
    return [result.losses for result in engine.run(make_batches(2, engine.schedule.micro_batches))]


@pytest.mark.parametrize("placement", ["replicated", "pipeline"])
def test_an_evaluation_before_the_first_step_leaves_training_as_it_is(tmp_path, placement):
    losses, _ = run_ranks(train_noisy, 2, placement, True, folder=tmp_path)
    assert losses == train_noisy("single_device", False)


def test_no_parameter_leaves_the_rank_that_holds_it(tmp_path):
    schedule = Schedule.build("gpipe", 2, 4, "pipeline", ranks=2)
    outcomes = run_ranks(evaluate, 2, "gpipe", "pipeline", 2, 4, {"ranks": 2}, folder=tmp_path)
    for rank, (rows, asked, held, _) in enumerate(outcomes):
        own = {stage for hop in path(schedule, 0) if hop.rank == rank for stage in hop.stages}
        assert {stage for stage, size in enumerate(held) if size} == own - {2}, "stage 2 has no parameters"
        assert (asked != []) is (rank == 0), "only the first rank reads samples"
        assert (rows != {}) is (rank == 1), "only the last rank has outputs"


@pytest.mark.parametrize("count", [0, 1])
def test_no_batch_or_one(tmp_path, count):
    outcomes = run_ranks(evaluate, 2, "gpipe", "pipeline", 2, 2, {}, count, folder=tmp_path)
    assert sum(len(rows) for rows, *_ in outcomes) == count * ROWS


def test_a_model_in_the_middle_of_a_run_is_not_evaluated():
    engine = make_engine("cdp_v2", "single_device", 2, 2)
    results = engine.run(make_batches(3, 2))
    next(results)
    with pytest.raises(RuntimeError, match="in the middle of another run"):
        engine.outputs(samples, 1)
    results.close()
