"""What users write around a training loop: it works, or it is refused with the way that does."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from ranks import run_ranks
from small_runs import make_batches, same
from torch import nn

from cdp_repro import Engine

CHANGED = r"parameter weight \(5, 5\) was changed outside the engine.*engine\.load_state_dict\(\)"
HOOK = r"parameter weight \(5, 5\) has a hook.*register_step_pre_hook"
RATE = r"learning rate.*learning_rate_factor=lambda step"
GRADIENT = r"clip_grad_norm_.*register_step_pre_hook"


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def linears(count=2):
    torch.manual_seed(0)
    return [nn.Linear(5, 5).double() for _ in range(count)]


def make_engine(optimizer=sgd, stages=None, mode="cdp_v2", **choices):
    return Engine(stages or linears(), F.cross_entropy, optimizer, mode, **choices)


def train(engine, steps=3):
    return [result.losses for result in engine.run(make_batches(steps, engine.schedule.micro_batches))]


# -------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_is_refused(method):
    stages = linears()
    handle = getattr(stages[1].weight, method)(lambda _: None)
    with pytest.raises(ValueError, match=HOOK):
        make_engine(stages=stages)
    handle.remove()
    engine = make_engine(stages=stages)
    train(engine)
    handle = getattr(stages[1].weight, method)(lambda _: None)
    with pytest.raises(ValueError, match=HOOK):
        train(engine)
    handle.remove()
    train(engine)
    assert engine.step == 6


# ----------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize(
    "use",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        lambda parameters: [parameter.grad.mul_(0.5) for parameter in parameters],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1).step(),
    ],
)
def test_gradients_cannot_be_used_in_the_loop(use):
    stages = linears()
    engine = make_engine(stages=stages)
    with pytest.raises(RuntimeError, match=GRADIENT):
        for _ in engine.run(make_batches(3, 2)):
            use([*stages[0].parameters()])


def test_nor_can_they_be_used_before_the_first_update():
    engine = make_engine()
    train(engine)
    stages = engine.model()  # an ordinary model until the next run begins
    asked = []

    def batches():
        with pytest.raises(RuntimeError, match=GRADIENT):
            nn.utils.clip_grad_norm_(stages.parameters(), 1.0)
        asked.append(engine.step)
        yield from make_batches(2, engine.schedule.micro_batches)

    assert len([*engine.run(batches())]) == 2 and asked == [3]


def test_the_model_is_an_ordinary_one_after_a_run():
    engine = make_engine()
    train(engine)
    inputs, targets = make_batches(1, 2)[0]
    model = engine.model()
    F.cross_entropy(model(inputs), targets).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    before = model[0].weight.detach().clone()
    assert torch.equal(copy.deepcopy(model)[0].weight, before)
    train(engine)
    assert not torch.equal(engine.model()[0].weight, before)


def clipping(params):
    def clip(*_):
        torch.nn.utils.clip_grad_norm_(params, 0.05)

    optimizer = sgd(params)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def clipped_by_hand(stages, batches, workers):
    """DP with the norm of each stage clipped, by plain torch."""
    model = nn.Sequential(*stages)
    optimizers = [sgd(stage.parameters()) for stage in stages]
    for inputs, targets in batches:
        for x, y in zip(inputs.chunk(workers), targets.chunk(workers), strict=True):
            (F.cross_entropy(model(x), y) / workers).backward()
        for stage, optimizer in zip(stages, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return model


def test_the_documented_way_clips_the_norm_of_each_stage():
    engine = make_engine(clipping, mode="dp")
    train(engine)
    expected = clipped_by_hand(linears(), make_batches(3, 2), 2)
    for mine, theirs in zip(engine.model().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def clip_on_ranks():
    engine = make_engine(clipping, placement="replicated")
    train(engine)
    return dict(engine.model().state_dict())


def test_it_clips_the_same_on_ranks_that_exchange_sums(tmp_path):
    engine = make_engine(clipping)
    train(engine)
    for each in run_ranks(clip_on_ranks, 2, folder=tmp_path):
        same(each, dict(engine.model().state_dict()))


# ---------------------------------------------------------------------------------------------- learning rates


def test_a_scheduler_that_comes_with_the_optimizer_is_refused():
    def scheduled(params):
        optimizer = sgd(params)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
        return optimizer

    with pytest.raises(ValueError, match=RATE):
        make_engine(scheduled)


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        lambda optimizer: optimizer.param_groups[0].update(lr=0.01),
    ],
)
def test_a_learning_rate_that_is_set_later_is_refused(change):
    optimizers = []

    def kept(params):
        optimizers.append(sgd(params))
        return optimizers[-1]

    engine = make_engine(kept)
    train(engine)
    change(optimizers[0])
    with pytest.raises(ValueError, match=RATE):
        train(engine)


def test_a_factor_on_the_rate_is_no_change_from_outside():
    engine = make_engine(learning_rate_factor=lambda step: 1 / (step + 1))
    train(engine)
    state = copy.deepcopy(engine.state_dict())
    other = make_engine(learning_rate_factor=lambda step: 1 / (step + 1))
    other.load_state_dict(state)
    assert train(other) == train(engine)


# -------------------------------------------------------------------------------------------- changed parameters


def clamp(stage):
    with torch.no_grad():
        stage.weight.clamp_(-0.1, 0.1)


def replace(stage):
    stage.weight.data = torch.zeros_like(stage.weight)


def load(stage):
    stage.load_state_dict({name: tensor + 1 for name, tensor in stage.state_dict().items()})


@pytest.mark.parametrize("change", [clamp, replace, load])
def test_parameters_that_are_changed_between_runs_are_refused(change):
    stages = linears()
    engine = make_engine(stages=stages)
    train(engine)
    change(stages[1])
    with pytest.raises(ValueError, match=CHANGED):
        train(engine)


def test_parameters_that_are_changed_in_the_loop_are_refused():
    stages = linears()
    engine = make_engine(stages=stages)
    with pytest.raises(ValueError, match=CHANGED):
        for _ in engine.run(make_batches(4, 2)):
            clamp(stages[0])


def test_the_documented_way_changes_all_versions():
    engine = make_engine()
    train(engine)
    state = engine.state_dict()
    for version in state["stages"][0]["versions"].values():
        version["weight"].clamp_(-0.1, 0.1)
    engine.load_state_dict(state)
    assert engine.model()[0].weight.abs().max() <= 0.1
    other = make_engine()
    other.load_state_dict(copy.deepcopy(state))
    assert train(engine) == train(other)


def change_on_ranks(placement, mode):
    """Change the model on every rank; return what the next run says."""
    engine = make_engine(placement=placement, mode=mode, collectives=placement == "zero")
    train(engine)
    clamp(engine.model()[0])
    with pytest.raises(ValueError, match=CHANGED):
        train(engine)
    return True


@pytest.mark.parametrize(("placement", "mode"), [("pipeline", "cdp_v2"), ("zero", "dp")])
def test_they_are_refused_on_every_rank(placement, mode, tmp_path):
    assert all(run_ranks(change_on_ranks, 2, placement, mode, folder=tmp_path))


# -------------------------------------------------------------------------------- buffers, and what stages are made of


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        return torch.tanh(self.linear(x) / self.temperature)


def tempered():
    torch.manual_seed(0)
    return [Tempered().double(), nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).double()]


def replace_part(stages):
    stages[1][0] = nn.Linear(5, 5).double()


def prune(stages):
    torch.nn.utils.prune.l1_unstructured(stages[1][0], "weight", amount=0.5)


def add_part(stages):
    stages[0].shift = nn.Parameter(torch.zeros(5))


OTHER_PARTS = "of stage {}, such as {}, were replaced, added, removed, frozen or unfrozen after the engine was made"
OTHER_BUFFER = r"buffer {1} of stage {0} was changed outside the engine.*engine\.load_state_dict\(\)"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace_part, OTHER_PARTS.format(1, "0.bias")),
        (prune, OTHER_PARTS.format(1, "0.weight")),
        (add_part, OTHER_PARTS.format(0, "shift")),
        (lambda stages: stages[0].requires_grad_(False), OTHER_PARTS.format(0, "linear.bias")),
        (lambda stages: stages[0].temperature.fill_(5), OTHER_BUFFER.format(0, "temperature")),
        (lambda stages: stages[1][1].reset_running_stats(), OTHER_BUFFER.format(1, "1.running_mean")),
    ],
)
def test_other_parts_and_buffers_between_runs_are_refused(change, told):
    stages = tempered()
    engine = make_engine(stages=stages)
    train(engine)
    engine.model().eval()(make_batches(1, 2)[0][0])  # an evaluation changes nothing
    train(engine)
    engine.model()
    change(stages)
    with pytest.raises(ValueError, match=told):
        train(engine)


def test_a_parameter_that_is_unfrozen_between_runs_is_refused():
    stages = tempered()
    stages[0].requires_grad_(False)
    engine = make_engine(stages=stages)
    train(engine)
    stages[0].requires_grad_(True)
    with pytest.raises(ValueError, match=OTHER_PARTS.format(0, "linear.bias")):
        train(engine)


def test_the_documented_way_changes_all_sets_of_a_buffer():
    state = (engine := make_engine(stages=tempered())).state_dict()
    for buffers in state["stages"][0]["buffers"]:
        buffers["temperature"].fill_(5)
    engine.load_state_dict(state)
    hotter = tempered()
    hotter[0].temperature.fill_(5)
    assert train(engine) == train(make_engine(stages=hotter)) != train(make_engine(stages=tempered()))


def test_stages_that_share_memory_are_refused():
    stages = linears()
    stages[1].weight = nn.Parameter(stages[0].weight.data)
    with pytest.raises(ValueError, match="stages 0 and 1 share the parameter weight"):
        make_engine(stages=stages)


def test_a_buffer_of_two_stages_may_be_constant_only():
    scale = nn.BatchNorm1d(5, affine=False).double()
    stages = [nn.Sequential(scale, stage) for stage in linears()]
    with pytest.raises(ValueError, match=r"stage 1 shares the buffer 0\.running_mean with a stage before it"):
        train(engine := make_engine(stages=stages)), engine.model()
    scale.momentum = 0.0
    scale.register_buffer("num_batches_tracked", None)
    train(engine := make_engine(stages=stages))
    engine.model()


def test_buffers_that_are_not_a_number_are_nobodys_fault():
    """A training that diverges has them; `torch.equal` finds no NaN equal to itself."""
    engine = make_engine(stages=tempered())
    state = engine.state_dict()
    for buffers in state["stages"][1]["buffers"]:
        buffers["1.running_mean"].fill_(torch.nan)
    engine.load_state_dict(state)
    assert engine.model()[1][1].running_mean.isnan().all()


# ------------------------------------------------------------------------------------------- gradients switched off


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused(switched_off):
    engine = make_engine()
    with switched_off(), pytest.raises(RuntimeError, match="gradients are switched off"):
        train(engine)


def test_gradients_that_the_loop_switches_off_are_missed():
    engine = make_engine()
    try:
        with pytest.raises(RuntimeError, match=r"undo set_grad_enabled\(False\)"):
            for _ in engine.run(make_batches(4, 2)):
                torch.set_grad_enabled(False)
    finally:
        torch.set_grad_enabled(True)


# --------------------------------------------------------------------------------------------------- two runs at once


def interleave():
    """Begin a run of one engine in the middle of another's; return the losses after that."""
    first, second = (make_engine(placement="replicated") for _ in range(2))
    results = first.run(make_batches(4, 2))
    next(results)
    with pytest.raises(RuntimeError, match="another engine of this process is in the middle of a run"):
        next(second.run(make_batches(4, 2)))
    list(results)
    return train(second)


def test_ranks_refuse_two_runs_at_once(tmp_path):
    assert run_ranks(interleave, 2, folder=tmp_path)[0] == train(make_engine())


# ---------------------------------------------------------------------------------------------- unfinished runs

UNFINISHED = """
import torch, torch.nn.functional as F
from cdp_repro import Engine

engine = Engine([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], F.cross_entropy,
                lambda params: torch.optim.SGD(params, lr=0.1))
results = engine.run([(torch.randn(8, 4), torch.randint(4, (8,)))] * 9)
print(next(results).step)
{end}
"""


@pytest.mark.parametrize(("end", "code", "told"), [("", 0, ""), ("raise SystemExit('the end')", 1, "the end\n")])
def test_a_run_that_is_left_unfinished_when_python_ends_says_nothing(end, code, told):
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED.format(end=end)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "0\n", told)


def continue_on_ranks(state):
    """Load a checkpoint into an engine that has not run, whose stages another engine has had."""
    stages = linears()
    first = make_engine(stages=stages, placement="replicated")
    train(first)
    second = make_engine(stages=stages, placement="replicated")
    second.load_state_dict(copy.deepcopy(state))
    return train(second)


def test_stages_and_states_go_from_one_engine_to_the_next(tmp_path):
    engine = make_engine()
    train(engine)
    state = copy.deepcopy(engine.state_dict())
    expected = train(engine)
    assert run_ranks(continue_on_ranks, 2, state, folder=tmp_path)[0] == expected
    again = make_engine(stages=[*engine.model()])
    again.load_state_dict(state)
    assert train(again) == expected
    train(make_engine(stages=[*engine.model()]))
