"""Ledger, stability, refusals, and the corners of what a stage may be."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.executor import Executor
from cdp_repro.engine.ledger import LedgerError
from cdp_repro.schedule.values import Kind

MODES = ("dp", "cdp_v1", "cdp_v2", "accumulation")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def linears(count=3, width=4):
    torch.manual_seed(0)
    return [nn.Linear(width, width) for _ in range(count)]


def make_batches(count=3, rows=12, width=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, width, generator=generator), torch.randint(width, (rows,), generator=generator))
        for _ in range(count)
    ]


def train(engine, batches=None):
    return [result.losses for result in engine.run(make_batches() if batches is None else batches)]


# ------------------------------------------------------------------------------------------------------- ledger


@pytest.mark.parametrize(
    ("mode", "position", "told"),
    [
        # always the newest version: worker 0 of step 1 finds U2@v1 done
        (
            "cdp_v1",
            -1,
            "forward of stage 2 on micro-batch 0 of step 1 used version 1; the rule asks for version 0",
        ),
        # always the oldest: worker 1 of step 1 is to be fresh while version 0 still lives for worker 0's backward
        (
            "cdp_v2",
            0,
            "forward of stage 1 on micro-batch 1 of step 1 used version 0; the rule asks for version 1",
        ),
    ],
)
def test_reading_another_version_fails_the_run(mode, position, told, monkeypatch):
    honest = Executor._read

    def other(self, value):
        alive = sorted(v for v in self.values if (v.kind, v.stage) == (value.kind, value.stage))
        return honest(self, alive[position] if value.kind == Kind.PARAMETERS else value)

    monkeypatch.setattr(Executor, "_read", other)
    with pytest.raises(LedgerError) as failure:
        train(Engine(linears(), F.cross_entropy, sgd, mode))
    assert told in str(failure.value)
    assert any("while running F" in note and "slot" in note for note in failure.value.__notes__)


def test_reading_an_older_version_fails_the_run(monkeypatch):
    kept = {}
    honest = Executor._read

    def oldest_ever(self, value):
        return (
            kept.setdefault(value.stage, honest(self, value)) if value.kind == Kind.PARAMETERS else honest(self, value)
        )

    monkeypatch.setattr(Executor, "_read", oldest_ever)
    with pytest.raises(LedgerError, match=r"stage 0 on micro-batch 0 of step 1 used version 0.*asks for version 1"):
        train(Engine(linears(), F.cross_entropy, sgd, "dp"))


@pytest.mark.parametrize("mode", MODES)
def test_every_read_is_in_the_ledger(mode):
    engine = Engine(linears(), F.cross_entropy, sgd, mode)
    train(engine)
    assert engine.ledger_reads == 2 * 3 * 3 * 3  # forwards and backwards of 3 steps, workers, stages


# ---------------------------------------------------------------------------------------------------- stability


class Well(nn.Module):
    """Adds 0.5 * L * x^2 of its own parameter to what comes in."""

    def __init__(self, curvature):
        super().__init__()
        self.x, self.curvature = nn.Parameter(torch.ones(1, dtype=torch.float64)), curvature

    def forward(self, inputs):
        return inputs + 0.5 * self.curvature * self.x**2


def quadratic(mode, n, lr_times_curvature, steps=200):
    """Return the losses of worker 0, n * 0.5 * L * x^2, from x = 1 everywhere."""
    curvature = 4.0
    engine = Engine(
        [Well(curvature) for _ in range(n)],
        lambda output, _: output.mean(),
        lambda params: torch.optim.SGD(params, lr=lr_times_curvature / curvature),
        mode,
    )
    batches = [(torch.zeros(n, 1, dtype=torch.float64), torch.zeros(n))] * steps
    return [result.losses[0] for result in engine.run(batches)]


@pytest.mark.parametrize(
    ("mode", "n", "limit"),
    [("cdp_v1", 1, 1.0), ("cdp_v1", 2, 1.0), ("dp", 1, 2.0), ("dp", 2, 2.0), ("cdp_v2", 1, 2.0)],
)
def test_plain_sgd_is_stable_up_to_the_limit_of_its_delay(mode, n, limit):
    """x' = x - lr L x(one step ago) has roots of modulus sqrt(lr L): stable up to lr = 1/L, without delay up to 2/L.

    With delay it swings, so the largest of the last losses is compared.
    """
    assert max(quadratic(mode, n, 0.95 * limit)[-8:]) < 1e-3
    assert max(quadratic(mode, n, 1.05 * limit)[-8:]) > 1e3


def test_delay_one_by_its_recurrence():
    x = [1.0, 1.0]  # theta[-1] = theta[0]
    for _ in range(50):
        x.append(x[-1] - 0.9 * x[-2])
    expected = [0.5 * 4.0 * value**2 for value in x[:50]]  # the loss of step t is that of theta[t - 1]
    assert quadratic("cdp_v1", 1, 0.9, 50) == pytest.approx(expected, abs=1e-12)


# ------------------------------------------------------------------------------------- parameters and gradients


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_stay_as_they_are(mode):
    stages = linears()
    stages[0].weight.requires_grad_(False)
    for parameter in stages[1].parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(stages)
    engine = Engine(stages, F.cross_entropy, sgd, mode)
    train(engine)
    assert torch.equal(engine.model()[0].weight, before[0].weight)
    assert not engine.model()[0].weight.requires_grad
    for mine, theirs in zip(engine.model()[1].parameters(), before[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(engine.model()[0].bias, before[0].bias)
    assert not torch.equal(engine.model()[2].weight, before[2].weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [[0], [0, 1], [2], [0, 1, 2]])
def test_wholly_frozen_stages_anywhere(mode, frozen):
    stages = linears()
    for number in frozen:
        stages[number].requires_grad_(False)
    before = copy.deepcopy(stages)
    engine = Engine(stages, F.cross_entropy, sgd, mode)
    train(engine)
    for number, (mine, theirs) in enumerate(zip(engine.model(), before, strict=True)):
        assert torch.equal(mine.weight, theirs.weight) == (number in frozen)


def plain_dp_losses(stages, batches, workers):
    """DP with plain SGD (no momentum) by hand."""
    model = nn.Sequential(*copy.deepcopy(stages))
    losses = []
    for inputs, targets in batches:
        model.zero_grad()
        parts = [
            F.cross_entropy(model(x), y) for x, y in zip(inputs.chunk(workers), targets.chunk(workers), strict=True)
        ]
        (sum(parts) / workers).backward()
        losses.append([part.item() for part in parts])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return losses, model


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x).tanh())


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("middle", [nn.Identity, nn.ReLU, nn.Flatten, Tied])
def test_unusual_stages_train_like_the_uncut_model(middle, place):
    stages = linears(2)
    stages.insert(place, middle())
    check_like_the_uncut_model(stages)


@pytest.mark.parametrize("width", [4, 1])
def test_a_stage_that_stops_the_gradient(width):
    """Width 1 and one row a micro-batch is the worst case: the missing gradient becomes 1 without a word."""
    torch.manual_seed(0)
    stages = [nn.Linear(4, width), Detach(), nn.Linear(width, 4)]
    check_like_the_uncut_model(stages, rows=1 if width == 1 else 4)


def check_like_the_uncut_model(stages, rows=4):
    n = len(stages)
    batches = make_batches(rows=rows * n)
    expected, model = plain_dp_losses(stages, batches, n)
    engine = Engine(stages, F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1), "dp")
    actual = train(engine, batches)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(engine.model().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", [sgd, lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)])
def test_parameters_unused_by_the_loss_have_no_gradient_and_so_no_weight_decay(mode, optimizer):
    torch.manual_seed(0)
    stages = [Unused(), Unused()]
    before = copy.deepcopy(stages)
    engine = Engine(stages, F.cross_entropy, optimizer, mode)
    train(engine)
    for mine, theirs in zip(engine.model(), before, strict=True):
        assert torch.equal(mine.unused.weight, theirs.unused.weight)
        assert not torch.equal(mine.used.weight, theirs.used.weight)


class Counter(nn.Module):
    """Keeps a buffer by assigning a new tensor to it, as plain modules may."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x


def test_a_buffer_that_a_stage_reassigns_is_kept():
    engine = Engine([Counter(), nn.Linear(4, 4)], F.cross_entropy, sgd, "cdp_v1")
    train(engine)
    assert engine.model()[0].calls.item() == 3


def test_the_model_is_the_users_modules_with_the_newest_parameters():
    stages = linears()
    engine = Engine(stages, F.cross_entropy, sgd, "cdp_v2")
    before = copy.deepcopy(stages)
    train(engine)
    assert all(mine is theirs for mine, theirs in zip(engine.model(), stages, strict=True))
    newest = engine.state_dict()["stages"][0]["versions"][3]["weight"]
    assert torch.equal(stages[0].weight, newest)
    assert not torch.equal(stages[0].weight, before[0].weight)
    engine.model().eval()
    train(engine)
    assert engine.model().training, "a run trains"


@pytest.mark.parametrize("mode", MODES)
def test_bf16_autocast_runs_and_losses_are_finite(mode):
    engine = Engine(
        linears(), F.cross_entropy, sgd, mode, autocast=lambda: torch.autocast("cpu", torch.bfloat16), traced_steps=1
    )
    losses = train(engine)
    assert torch.tensor(losses).isfinite().all()
    assert all(parameter.dtype is torch.float32 for parameter in engine.model().parameters())
    assert losses != train(Engine(linears(), F.cross_entropy, sgd, mode)), "autocast had an effect"


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_that_its_micro_batches_do_not_divide(mode):
    with pytest.raises(ValueError, match=r"10 is not divisible by its 3 micro-batches .*; 9 would be"):
        train(Engine(linears(), F.cross_entropy, sgd, mode), make_batches(rows=10))
    with pytest.raises(ValueError, match=r"15 is not divisible by its 6 micro-batches .*; 12 would be"):
        train(Engine(linears(), F.cross_entropy, sgd, mode, accumulate=2), make_batches(rows=15))


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (
            (torch.zeros(0, 4), torch.zeros(0)),
            r"a mini-batch of 0 is not divisible by its 3 micro-batches .*; 3 would be",
        ),
        ((torch.zeros(10, 4), torch.zeros(10)), r"9 would be.*drop_last=True"),
        (torch.zeros(9, 4), r"two tensors, \(inputs \[B, \.\.\.\], targets \[B, \.\.\.\]\), not \(a tensor \[9, 4\]\)"),
        (
            (torch.zeros(9, 4), torch.zeros(9), torch.zeros(9)),
            r"not \(a tensor \[9, 4\], a tensor \[9\], a tensor \[9\]\)",
        ),
        ((torch.zeros(9, 4), [0] * 9), r"not \(a tensor \[9, 4\], a list\)"),
        ({"inputs": torch.zeros(9, 4)}, r"not \(a dict\); what needs more is an object with the methods inputs"),
    ],
)
def test_batches_that_are_none(batch, told):
    engine = Engine(linears(), F.cross_entropy, sgd)
    with pytest.raises(ValueError, match=told):
        train(engine, [batch])
    assert len(train(engine)) == 3, "nothing has happened yet"


def with_a_sparse_buffer():
    stage = nn.Linear(4, 4)
    stage.register_buffer("graph", torch.eye(4).to_sparse())
    return stage


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (nn.Linear(4, 4), r"stages is a Linear, not a list: give \[module\] for one stage"),
        (nn.Sequential(*linears()), r"a Sequential, not a list: .*or \[\*module\] for a stage of each of its 3 parts"),
        (F.relu, r"stages is a function, not a list"),
        ((each for each in linears()), r"stages is a generator, not a list"),
        ([nn.Linear(4, 4), F.relu], r"stage 1 is a function, not a module: call it in the forward of an nn\.Module"),
        ([nn.Linear(4, 4), with_a_sparse_buffer()], r"graph of stage 1 is torch\.sparse_coo: .* in a plain attribute"),
    ],
)
def test_stages_that_are_no_list_of_modules(stages, told):
    with pytest.raises(ValueError, match=told):
        Engine(stages, F.cross_entropy, sgd)


def test_stages_in_a_module_list():
    assert len(train(Engine(nn.ModuleList(linears()), F.cross_entropy, sgd))) == 3


@pytest.mark.parametrize(("state", "lacks"), [({}, "stages, step"), ({"step": 1}, "stages")])
def test_a_state_that_is_none(state, lacks):
    engine = Engine(linears(), F.cross_entropy, sgd)
    with pytest.raises(ValueError, match=rf"the state lacks {lacks}: give what state_dict\(\) returned"):
        engine.load_state_dict(state)
    assert len(train(engine)) == 3, "the engine is as it was"


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"stages=3 is not a multiple of workers=2: use stages=2 or stages=4"):
        Engine(linears(), F.cross_entropy, sgd, workers=2)
    with pytest.raises(ValueError, match="at least 1 stage"):
        Engine([], F.cross_entropy, sgd)
    with pytest.raises(ValueError, match="staleness matrix"):
        Engine(linears(), F.cross_entropy, sgd, [[1, 1], [1, 1]])


def test_no_workers():
    with pytest.raises(ValueError, match="workers=0"):
        Engine(linears(), F.cross_entropy, sgd, workers=0)


def test_parameters_shared_by_two_stages():
    stages = linears()
    stages[2].weight = stages[0].weight
    with pytest.raises(ValueError, match=r"stages 0 and 2 share the parameter weight"):
        Engine(stages, F.cross_entropy, sgd)


def test_parameters_of_one_stage_that_share_their_memory():
    """An update in place would keep them alike, one that keeps the version before would not."""
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stage[1].weight.data = stage[0].weight.data
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight of stage 1 share memory.* b\.weight = a\.weight"):
        Engine([nn.Linear(4, 4), stage], F.cross_entropy, sgd)
    stage[1].weight = stage[0].weight
    Engine([nn.Linear(4, 4), stage], F.cross_entropy, sgd)
    part = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    part[1].weight = nn.Parameter(part[0].weight.data.view(4, 8)[2:].view(-1)[:16].view(2, 8))  # another offset
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight of stage 1 share memory"):
        Engine([nn.Linear(4, 4), part], F.cross_entropy, sgd)
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    frozen[1].weight.data = frozen[0].weight.data
    Engine([nn.Linear(4, 4), frozen], F.cross_entropy, sgd)  # nothing updates them


def test_parameters_of_two_stages_that_share_memory_at_another_offset():
    stages = [nn.Linear(4, 4), nn.Linear(4, 2)]
    stages[1].weight = nn.Parameter(stages[0].weight.data[2:])
    with pytest.raises(ValueError, match="stages 0 and 1 share the parameter weight"):
        Engine(stages, F.cross_entropy, sgd)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Fails(nn.Module):
    def __init__(self, at_call, error=FloatingPointError):
        super().__init__()
        self.calls, self.at_call, self.error = 0, at_call, error

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at_call:
            raise self.error("no good")
        return x


def test_a_stage_that_returns_a_tuple():
    with pytest.raises(TypeError, match=r"one tensor.*tuple") as failure:
        train(Engine([nn.Linear(4, 4), Pair()], F.cross_entropy, sgd))
    assert "while running F1.m0@v0 in slot 1" in failure.value.__notes__


def test_an_exception_in_a_stage_names_action_and_slot_and_ends_the_engine():
    engine = Engine([nn.Linear(4, 4), Fails(4), nn.Linear(4, 4)], F.cross_entropy, sgd, "cdp_v1")
    with pytest.raises(FloatingPointError) as failure:
        train(engine)
    # the fourth forward of stage 1 is micro-batch 3's: slot 2 * 3 + 1
    assert failure.value.__notes__ == ["while running F1.m3@v0 in slot 7"]
    for refused in (
        lambda: train(engine),
        engine.model,
        engine.state_dict,
        lambda: engine.load_state_dict({}),
    ):
        with pytest.raises(RuntimeError, match=r"no good.*new engine"):
            refused()


def test_a_failure_while_draining_is_told_as_what_it_is():
    engine = Engine([nn.Linear(4, 4), Fails(6), nn.Linear(4, 4)], F.cross_entropy, sgd, "cdp_v1")
    iterator = engine.run(make_batches())
    next(iterator)
    with pytest.raises(FloatingPointError):
        iterator.close()
    with pytest.raises(RuntimeError, match="no good"):
        engine.state_dict()


def test_an_interrupted_run_is_told_as_one_that_failed():
    """Its iterator is gone, so that nobody could exhaust or close it."""
    engine = Engine([nn.Linear(4, 4), Fails(4, KeyboardInterrupt), nn.Linear(4, 4)], F.cross_entropy, sgd, "cdp_v1")
    with pytest.raises(KeyboardInterrupt):
        train(engine)
    with pytest.raises(RuntimeError, match=r"failed in step 0: KeyboardInterrupt.*new engine"):
        engine.state_dict()


def test_running_twice_at_once():
    engine = Engine(linears(), F.cross_entropy, sgd, "cdp_v1")
    first = engine.run(make_batches())
    next(first)
    for refused in (lambda: train(engine), engine.model, engine.state_dict):
        with pytest.raises(RuntimeError, match="middle of another run; exhaust or close"):
            refused()
    list(first)
    assert train(engine, make_batches(1))


def state_of(mode="cdp_v1", stages=None, workers=None, optimizer=sgd):
    engine = Engine(stages or linears(), F.cross_entropy, optimizer, mode, workers=workers)
    train(engine)
    return copy.deepcopy(engine.state_dict())


def test_state_of_another_model():
    engine = Engine(linears(), F.cross_entropy, sgd, "cdp_v1")
    with pytest.raises(ValueError, match=r"another model.*weight: \(5, 5\) for \(4, 4\)"):
        wide = Engine(linears(width=5), F.cross_entropy, sgd, "cdp_v1")
        train(wide, make_batches(width=5))
        engine.load_state_dict(wide.state_dict())
    with pytest.raises(ValueError, match=r"2 stages, this engine 3"):
        engine.load_state_dict(state_of(stages=linears(2)))


def test_state_of_another_precision_is_refused_rather_than_rounded():
    engine = Engine(linears(), F.cross_entropy, sgd, "cdp_v1")
    state = state_of()
    finer = {name: tensor.double() for name, tensor in state["stages"][1]["versions"][2].items()}
    state["stages"][1]["versions"][2] = finer
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(ValueError, match=r"weight is torch.float64, here torch.float32; convert the stages"):
        engine.load_state_dict(state)
    after = engine.state_dict()
    assert after["step"] == before["step"] == 0
    for one, other in zip(before["stages"], after["stages"], strict=True):
        torch.testing.assert_close(one["versions"], other["versions"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda stage: stage.pop("optimizer"), "damaged, or not of state_dict.*optimizer"),
        (lambda stage: stage.pop("buffers"), "damaged, or not of state_dict.*buffers"),
        (lambda stage: stage.update(versions=None), "damaged, or not of state_dict"),
        (lambda stage: stage["optimizer"]["state"].pop("state"), "damaged, or not of state_dict"),
        (lambda stage: stage["optimizer"]["state"]["state"].update({7: {}}), r"parameters in no group: \[7\]"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, said):
    engine, state = Engine(linears(), F.cross_entropy, sgd, "cdp_v1"), state_of()
    before = copy.deepcopy(engine.state_dict())
    damage(state["stages"][-1])
    with pytest.raises(ValueError, match=said):
        engine.load_state_dict(state)
    assert str(engine.state_dict()) == str(before)


def test_state_of_another_number_of_workers():
    state = state_of("dp", workers=1)
    with pytest.raises(ValueError, match=r"1 sets of buffers, this run has 3"):
        Engine(linears(), F.cross_entropy, sgd, "dp").load_state_dict(state)


def test_state_of_a_fresher_mode():
    with pytest.raises(ValueError, match=r"versions \[3\], this mode needs \[2, 3\]"):
        Engine(linears(), F.cross_entropy, sgd, "cdp_v1").load_state_dict(state_of("dp"))


@pytest.mark.parametrize("mode", ["dp", "cdp_v2"])
def test_state_of_a_staler_mode(mode):
    with pytest.raises(ValueError):
        Engine(linears(), F.cross_entropy, sgd, mode).load_state_dict(state_of("cdp_v1"))


def test_a_refused_state_changes_nothing():
    stages = [*linears(2), nn.Linear(4, 5)]
    engine = Engine(linears(), F.cross_entropy, sgd, "cdp_v1")
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(ValueError):
        engine.load_state_dict(state_of(stages=stages))
    after = engine.state_dict()
    for mine, theirs in zip(after["stages"], before["stages"], strict=True):
        assert mine["versions"].keys() == theirs["versions"].keys()


def test_a_state_of_other_parameter_groups_changes_nothing():
    def in_groups(parameters):
        return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1, momentum=0.9)

    state = state_of()
    engine = Engine(linears(), F.cross_entropy, in_groups, "cdp_v1")
    train(engine, make_batches(1))
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this engine's has groups of \[1, 1\]"):
        engine.load_state_dict(state)
    for mine, theirs in zip(engine.state_dict()["stages"], before["stages"], strict=True):
        torch.testing.assert_close(mine["versions"], theirs["versions"], rtol=0, atol=0)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss_fn": None}, r"loss_fn is a NoneType, not a function: give torch\.nn\.functional\.cross_entropy"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, r"optimizer is a SGD, not a function: give lambda"),
        ({"optimizer": lambda _: None}, r"made a NoneType, not an optimizer of torch: each stage has one of its own"),
        ({"optimizer": torch.optim.LBFGS}, r"made a LBFGS, whose step computes the loss again and again"),
        ({"optimizer": WithoutRate}, r"made a WithoutRate without a learning rate"),
        ({"optimizer": lambda p: sgd(p[:1])}, r"made one of 1 parameters, not of the 2 given"),
        (
            {"delay": "error_feedback"},
            r"delay is a str, not a function: give ErrorFeedback of cdp_repro\.engine\.delay",
        ),
        ({"learning_rate_factor": lambda _: -1.0}, r"learning_rate_factor gave -1\.0: must be finite, 0 or more"),
        ({"learning_rate_factor": lambda _: math.nan}, r"learning_rate_factor gave nan"),
        ({"loss_fn": lambda *pair: F.cross_entropy(*pair).detach()}, r"a loss that has no gradient: leave out detach"),
        (
            {"stages": [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]},
            r"changes its input in place, .*: use inplace=False in the layer that comes first",
        ),
    ],
)
def test_what_cannot_train_is_refused_with_what_can(given, said):
    usual = {"stages": [nn.Linear(4, 4), nn.Linear(4, 4)], "loss_fn": F.cross_entropy, "optimizer": sgd}
    batch = torch.randn(4, 4), torch.randint(0, 4, (4,))
    with pytest.raises(ValueError, match=said):
        for _ in Engine(**(usual | given)).run([batch] * 2):
            pass


class FrozenBatchNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> FrozenBatchNorm:  # whatever is asked
        return super().train(False)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, FrozenBatchNorm])
def test_a_layer_that_keeps_itself_in_eval_mode_stays_frozen(norm):
    stages = [nn.Sequential(nn.Linear(4, 4), norm(4)), nn.Linear(4, 4)]
    engine = Engine(stages, F.cross_entropy, sgd)
    for _ in engine.run([(torch.randn(8, 4), torch.randint(0, 4, (8,)))] * 2):
        pass
    counted = engine.model().state_dict()["0.1.num_batches_tracked"]
    assert bool(counted) == (norm is nn.BatchNorm1d)


class WithAttribute(nn.Linear):
    """Uses a tensor that takes a gradient and is no parameter."""

    def __init__(self):
        super().__init__(4, 4)
        self.__dict__["shift"] = torch.zeros(4, requires_grad=True)

    def forward(self, x):
        return super().forward(x) + self.shift


@pytest.mark.parametrize("place", ["loss", "stage", "stage of the loss"])
def test_a_tensor_that_nothing_would_train_is_refused(place):
    """A loss with parameters, or one that takes a stage's: a stage is trained as versions, of which it is none."""
    scale = nn.Parameter(torch.ones(4))
    stages = [nn.Linear(4, 4), WithAttribute() if place == "stage" else nn.Linear(4, 4)]
    used = {"loss": scale, "stage": torch.ones(4), "stage of the loss": stages[0].bias}[place]
    engine = Engine(
        stages, lambda output, targets: F.cross_entropy(output * used, targets),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1), "cdp_v2",
    )  # fmt: skip
    before = [parameter.clone() for stage in stages for parameter in stage.parameters()]
    with pytest.raises(ValueError, match=r"uses a tensor \(4,\) that takes a gradient .* nothing would train it"):
        list(engine.run([(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))] * 3))
    assert all(map(torch.equal, before, (parameter for stage in stages for parameter in stage.parameters())))
    assert scale.grad is None


# ------------------------------------------------------------------------------------------------- another cut


@pytest.mark.parametrize(("mode", "changes"), [("dp", False), ("cdp_v1", False), ("cdp_v2", True)])
def test_another_cut_changes_what_cdp_v2_trains_as_it_changes_which_layers_are_read_late(mode, changes):
    """The report says so beside the memory that a cut by activation bytes saves; slot orders change nothing."""

    def trained(first, slot_order="paper"):
        layers = [layer.double() for layer in linears(4)]
        stages = [nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])]
        engine = Engine(stages, F.cross_entropy, sgd, mode=mode, workers=2, slot_order=slot_order)
        train(engine, [(inputs.double(), targets) for inputs, targets in make_batches(4)])
        return torch.cat([parameter.detach().flatten() for parameter in engine.model().parameters()])

    assert torch.equal(trained(1), trained(3)) is not changes
    assert torch.equal(trained(1), trained(1, "backward_first"))
