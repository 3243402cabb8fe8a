"""The baselines against our engine in mode dp, in real gloo processes, in float64.

The ranks of one N run everything once, and return what they have seen; the tests read it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from cdp_repro.baselines import BASELINES, baseline_class
from cdp_repro.engine.engine import Engine

STEPS, HALF = 4, 2
SEED = 7
TOLERANCE = {"rtol": 1e-10, "atol": 1e-14}
"""The libraries add gradients in another order than the engine does: some 1e-16 relative to each addition."""


class Block(nn.Module):
    """A residual block with all that could differ: BatchNorm, dropout, an in-place activation."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs):
        return F.relu(inputs + self.dropout(self.norm(self.conv(inputs))), inplace=True)


def make_stages(count):
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
    head = nn.Sequential(Block(5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))
    return [stage.double() for stage in (stem, *(Block(5) for _ in range(count - 2)), head)]


def make_batches(workers):
    generator = torch.Generator().manual_seed(1)
    size = 4 * workers
    return [
        (
            torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def settings(workers):
    return {"workers": workers, "seed": SEED, "learning_rate_factor": lambda step: 1.0 if step < 3 else 0.1}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def same(actual, expected, what, **tolerance):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].detach(),
            tensor.detach(),
            **(tolerance or TOLERANCE),
            equal_nan=True,
            msg=lambda m, name=name: f"{what} {name}: {m}",
        )


def refusal_or(call):
    """Return the message of the ValueError, or else the result."""
    try:
        return call()
    except ValueError as error:
        return str(error)


# --- on each rank ---------------------------------------------------------------------------------------------------


def observe_all(workers):
    return {name: observe(name, workers) for name in BASELINES}


def observe(name, workers):
    """Run one baseline in every way that the tests ask about."""
    batches = make_batches(workers)

    def make(stages=workers, optimizer=sgd, **changed):
        return baseline_class(name)(make_stages(stages), F.cross_entropy, optimizer, **{**settings(workers), **changed})

    baseline = make()
    losses = [result.losses for result in baseline.run(batches[:HALF])]
    half = on_all_ranks(baseline.state_dict())
    random_state = torch.get_rng_state()
    losses += [result.losses for result in baseline.run(batches[HALF:])]
    resumed = make()
    resumed.load_state_dict(half)
    resumed_losses = [result.losses for result in resumed.run(batches[HALF:])]
    with_adamw = make(optimizer=adamw)
    adamw_losses = [result.losses for result in with_adamw.run(batches)]
    in_other_layout = [(images.to(memory_format=torch.channels_last), labels) for images, labels in batches[:1]]
    watched = make()
    if name == "fsdp2":
        sharded = sharded_again(watched)
    return {
        "channels_last losses": [result.losses for result in watched.run(in_other_layout)],
        "sharded again": sharded if name == "fsdp2" else None,
        "losses": losses,
        "step": baseline.step,
        "model": baseline.model().state_dict(),
        "half": half,
        "end": baseline.state_dict(),
        "resumed losses": resumed_losses,
        "resumed step": resumed.step,
        "resumed end": resumed.state_dict(),
        "adamw losses": adamw_losses,
        "adamw model": with_adamw.model().state_dict(),
        "parameter bytes": baseline.parameter_bytes,
        "random state kept": torch.equal(random_state, torch.get_rng_state()),
        "refused world": refusal_or(lambda: make(workers=workers + 1)),
        "one stage more": refusal_or(lambda: make(stages=workers + 1).model().state_dict()),
        "refused mode": refusal_or(lambda: make().load_state_dict(two_versions(half))),
        "refused optimizer": refusal_or(lambda: make(optimizer=adamw).load_state_dict(half)),
        "refused workers": refusal_or(lambda: make().load_state_dict(one_worker_fewer(half))),
    }


def sharded_again(baseline):
    """Return a list that will hold, for each forward of stage 1, whether stage 0 is in shards by then."""
    first, second = (stage.stage for stage in baseline._stages[:2])
    found = []
    second.register_forward_pre_hook(
        lambda *_: found.append(all(isinstance(each, DTensor) for each in first.parameters()))
    )
    return found


def on_all_ranks(state):
    box: list[Any] = [state]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def two_versions(state):
    stages = [{**stage, "versions": {**stage["versions"], state["step"] - 1: {}}} for stage in state["stages"]]
    return {**state, "stages": stages}


def one_worker_fewer(state):
    return {**state, "stages": [{**stage, "buffers": stage["buffers"][1:]} for stage in state["stages"]]}


# --- in the test -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3], ids="{} workers".format)
def seen(request, tmp_path_factory):
    """Return what each rank has seen, [rank][baseline]."""
    return run_ranks(observe_all, request.param, request.param, folder=tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected(seen):
    """Return losses and final engine of the same training by our engine, by optimizer."""
    workers, found = len(seen), {}
    for optimizer in (sgd, adamw):
        engine = Engine(make_stages(workers), F.cross_entropy, optimizer, "dp", **settings(workers))
        found[optimizer] = [result.losses for result in engine.run(make_batches(workers))], engine
    return found


every_baseline = pytest.mark.parametrize("name", BASELINES)


def rows(losses):
    return {f"of step {step}": torch.tensor(row, dtype=torch.float64) for step, row in enumerate(losses)}


@every_baseline
def test_losses_of_every_worker_equal_the_engines(seen, expected, name):
    same(rows(seen[0][name]["losses"]), rows(expected[sgd][0]), "losses")
    assert seen[0][name]["step"] == STEPS


@every_baseline
def test_other_ranks_know_what_they_have_computed(seen, name):
    for rank, theirs in enumerate(seen[1:], 1):
        known = computed_losses(name, rank, len(seen))
        for mine, all_losses in zip(theirs[name]["losses"], seen[0][name]["losses"], strict=True):
            assert {i for i, loss in enumerate(mine) if not math.isnan(loss)} == known
            assert all(mine[i] == all_losses[i] for i in known)


def computed_losses(name, rank, workers):
    """Return the workers whose losses a rank computes: of a pipeline, the last rank all of them."""
    if not name.startswith("torch_"):
        return {rank}
    return set(range(workers)) if rank == workers - 1 else set()


@every_baseline
def test_model_equals_the_engines_on_every_rank(seen, expected, name):
    for rank, theirs in enumerate(seen):
        same(theirs[name]["model"], expected[sgd][1].model().state_dict(), f"model of rank {rank}")


@every_baseline
def test_adamw_equals_the_engines(seen, expected, name):
    same(rows(seen[0][name]["adamw losses"]), rows(expected[adamw][0]), "losses")
    # AdamW divides by the root of a gradient's square: where that is next to nothing, rounding is all there is
    same(seen[0][name]["adamw model"], expected[adamw][1].model().state_dict(), "model", rtol=1e-7, atol=1e-9)


@every_baseline
def test_state_is_the_engines(seen, expected, name):
    mine, theirs = seen[0][name]["end"], expected[sgd][1].state_dict()
    assert mine["step"] == theirs["step"] == STEPS
    for j, (stage, engine_stage) in enumerate(zip(mine["stages"], theirs["stages"], strict=True)):
        assert set(stage) == set(engine_stage) and set(stage["versions"]) == {STEPS}
        same(stage["versions"][STEPS], engine_stage["versions"][STEPS], f"stage {j}")
        for i, buffers in enumerate(engine_stage["buffers"]):
            same(stage["buffers"][i], buffers, f"stage {j}, worker {i}")
        assert stage["optimizer"]["class"] == "SGD"
        state, engine_state = (part["optimizer"]["state"] for part in (stage, engine_stage))
        assert state["param_groups"] == engine_state["param_groups"]
        assert set(state["state"]) == set(engine_state["state"])
        for index, entry in engine_state["state"].items():
            same(state["state"][index], entry, f"stage {j}, optimizer of parameter {index}")
    assert all(theirs[name]["end"] == {} for theirs in seen[1:])


@every_baseline
def test_a_resumed_run_equals_one_that_was_not_stopped(seen, name):
    mine = seen[0][name]
    # bitwise, but for DDP, which sorts its buckets anew after its first step and so adds in another order
    tolerance = {"rtol": 1e-12, "atol": 1e-15} if name == "ddp" else {"rtol": 0, "atol": 0}
    same(rows(mine["resumed losses"]), rows(mine["losses"][HALF:]), "losses", **tolerance)
    assert mine["resumed step"] == STEPS
    for stage, resumed in zip(mine["end"]["stages"], mine["resumed end"]["stages"], strict=True):
        same(resumed["versions"][STEPS], stage["versions"][STEPS], "version", **tolerance)
        for i, buffers in enumerate(stage["buffers"]):
            same(resumed["buffers"][i], buffers, f"worker {i}", **tolerance)


@every_baseline
def test_the_engine_can_go_on_from_a_baseline(seen, expected, name):
    workers = len(seen)
    engine = Engine(make_stages(workers), F.cross_entropy, sgd, "dp", **settings(workers))
    engine.load_state_dict(seen[0][name]["half"])
    losses = [result.losses for result in engine.run(make_batches(workers)[HALF:])]
    same(rows(losses), rows(expected[sgd][0][HALF:]), "losses")


@every_baseline
def test_parameter_bytes_are_those_of_the_rank(seen, expected, name):
    of_stage = [sum(p.nbytes for p in stage.parameters()) for stage in make_stages(len(seen))]
    held = [theirs[name]["parameter bytes"] for theirs in seen]
    if name == "ddp":
        assert held == [sum(of_stage)] * len(seen)
    elif name == "fsdp2":
        assert sum(held) == sum(of_stage) and max(held) < sum(of_stage)
    else:
        assert held == of_stage


@pytest.mark.parametrize("name", ["torch_gpipe", "torch_1f1b"])
def test_a_pipeline_sends_what_comes_of_images_in_another_layout(seen, name):
    """In the others dropout, which draws in the order of memory, draws for other values."""
    same(rows(seen[0][name]["channels_last losses"]), rows(seen[0][name]["losses"][:1]), "losses")


def test_sharded_stages_are_whole_only_while_they_run(seen):
    """Else memory of the library's data parallelism would be that of whole models, in a comparison with ours."""
    for theirs in seen:
        assert theirs["fsdp2"]["sharded again"] == [True]


@every_baseline
def test_training_leaves_the_default_generator_alone(seen, name):
    assert all(theirs[name]["random state kept"] for theirs in seen)


@every_baseline
def test_what_does_not_fit_is_refused_with_both_numbers(seen, name):
    n = len(seen)
    for theirs in seen:
        mine = theirs[name]
        assert f"workers={n + 1} runs on {n + 1} processes, not on {n}:" in mine["refused world"]
        if name.startswith("torch_"):
            assert f"{n + 1} stages do not fit {n} ranks" in mine["one stage more"]
        assert f"the versions [{HALF - 1}, {HALF}]" in mine["refused mode"]
        assert "of the optimizer SGD, this run has AdamW" in mine["refused optimizer"]
        assert f"has {n - 1} sets of buffers, this run has {n}" in mine["refused workers"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_data_parallelism_takes_any_number_of_stages(seen, name):
    given = nn.Sequential(*make_stages(len(seen) + 1)).state_dict()
    for rank, theirs in enumerate(seen):
        same(theirs[name]["one stage more"], given, f"model of rank {rank}", rtol=0, atol=0)


@every_baseline
def test_no_process_group_is_refused(name):
    with pytest.raises(ValueError, match="runs on 2 processes, not on 1: start 2"):
        baseline_class(name)(make_stages(2), F.cross_entropy, sgd, workers=2)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def losses_in_bfloat16(name):
    """Losses of two steps of a baseline, and, with another context, of the first step; rank 0 knows them all."""
    found = []
    for autocast in ({"autocast": bfloat16}, {}):
        stages = [stage.float().eval() for stage in make_stages(2)]  # training puts them into training mode
        trained = baseline_class(name)(stages, F.cross_entropy, sgd, workers=2, seed=SEED, **autocast)
        batches = [(inputs.float(), targets) for inputs, targets in make_batches(2)[:2]]
        found.append([result.losses for result in trained.run(batches)])
    return found


@pytest.mark.parametrize("name", BASELINES)
def test_forwards_and_losses_are_computed_in_the_given_context(tmp_path, name):
    inside, outside = run_ranks(losses_in_bfloat16, 2, name, folder=tmp_path)[0]
    stages = [stage.float() for stage in make_stages(2)]
    engine = Engine(stages, F.cross_entropy, sgd, "dp", workers=2, seed=SEED, autocast=bfloat16)
    batches = [(inputs.float(), targets) for inputs, targets in make_batches(2)[:2]]
    expected = [result.losses for result in engine.run(batches)]
    assert inside[0] == expected[0], "nothing has been added up yet"
    torch.testing.assert_close(inside, expected, rtol=1e-2, atol=0)
    assert all(mine != other for mine, other in zip(inside[0], outside[0], strict=True))
