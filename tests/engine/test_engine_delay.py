"""Methods against stale reads: against the naive reference, on every placement, and after a resume."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import product

import pytest
import reference
import small_runs
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Version
from cdp_repro.engine.delay import DELAYS, Compensation, ErrorFeedback, Prediction, Uncorrected
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.predict.training_state import copied_bytes
from cdp_repro.schedule import Program, Schedule

STEPS = 12
MATRIX = [[3, 1, 0], [1, 2, 0], [2, 0, 0]]
"""Up to three steps late; the last stage is always fresh."""
METHODS = {
    "error_feedback": (lambda: reference.ErrorFeedback(), ErrorFeedback),
    "error_feedback, c = 1/2": (lambda: reference.ErrorFeedback(0.5), partial(ErrorFeedback, strength=0.5)),
    "prediction": (lambda: reference.Prediction(), Prediction),
    "compensation": (lambda: reference.Compensation(2.0), partial(Compensation, strength=2.0)),
}
OPTIMIZERS = {
    "sgd": (
        lambda: reference.SGD(0.1, 0.9, 0.01, nesterov=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "adamw": (
        lambda: reference.AdamW(0.01, (0.8, 0.9), 1e-6, 0.1),
        lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
    ),
    "nadamw": (
        lambda: reference.NAdamW(0.01, (0.8, 0.9), 0.1),
        lambda params: torch.optim.NAdam(
            params, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True
        ),
    ),
}
each_method = pytest.mark.parametrize("method", METHODS)


def make_stages():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh())
    stages = [first, nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)]
    stages[1][0].bias.requires_grad_(False)
    return [stage.double() for stage in stages]


def make_batches(count=STEPS, rows=12):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 5, generator=draw, dtype=torch.float64), torch.randint(3, (rows,), generator=draw))
        for _ in range(count)
    ]


def factor(step):
    return 1.0 if step < 6 else 0.3


def make_engine(mode, optimizer="sgd", **choices):
    return Engine(
        make_stages(), F.cross_entropy, OPTIMIZERS[optimizer][1], mode, learning_rate_factor=factor, **choices
    )


def trained(engine, batches):
    return [result.losses for result in engine.run(batches)]


def differs(mine, theirs):
    return max((tensor - theirs[name]).abs().max().item() for name, tensor in mine.items())


def check_against_reference(mode, optimizer, delay, theirs, clip=None, **choices):
    """Run in pieces, with a drain after each; compare all parameters after each, and the losses of every step."""
    batches = make_batches()
    expected = reference.train(
        make_stages(), F.cross_entropy, OPTIMIZERS[optimizer][0](), mode, 3, batches, factor, delay=theirs, clip=clip
    )
    engine, losses, done = make_engine(mode, optimizer, delay=delay, **choices), [], 0
    for piece in (1, 2, 5, 4):
        losses += trained(engine, batches[done : done + piece])
        done += piece
        assert differs(dict(engine.model().named_parameters()), expected.thetas[done]) < 1e-12
    mine, naive = (torch.tensor(each, dtype=torch.float64) for each in (losses, expected.losses))
    torch.testing.assert_close(mine, naive, rtol=0, atol=1e-12)
    return expected


@each_method
@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2", MATRIX], ids=str)
def test_agrees_with_the_naive_rule(method, mode):
    theirs, delay = METHODS[method]
    expected = check_against_reference(mode, "sgd", delay, theirs())
    plain = reference.train(make_stages(), F.cross_entropy, OPTIMIZERS["sgd"][0](), mode, 3, make_batches(), factor)
    assert differs(expected.thetas[-1], plain.thetas[-1]) > 1e-4, "or the agreement says nothing"


@each_method
@pytest.mark.parametrize("optimizer", ["adamw", "nadamw"])
def test_agrees_with_the_naive_rule_with_adam(method, optimizer):
    theirs, delay = METHODS[method]
    check_against_reference("cdp_v1", optimizer, delay, theirs())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_agree_with_their_definitions(optimizer):
    check_against_reference("cdp_v2", optimizer, Uncorrected, None)


@pytest.mark.parametrize("method", ["error_feedback", "prediction", "compensation"])
def test_without_stale_reads_nothing_changes(method):
    plain, corrected = make_engine("dp"), make_engine("dp", delay=DELAYS[method])
    assert trained(plain, make_batches()) == trained(corrected, make_batches())
    small_runs.same(dict(plain.model().named_parameters()), dict(corrected.model().named_parameters()))
    assert corrected.delay_bytes == 0


@pytest.mark.parametrize("method", [ErrorFeedback, Compensation])
@pytest.mark.parametrize("strength", [-0.5, float("nan"), float("inf"), "1"])
def test_a_strength_that_is_no_amount_is_refused(method, strength):
    with pytest.raises(ValueError, match="use a finite number, 0 or more"):
        method([1], strength=strength)


def test_error_feedback_is_the_plain_optimizer_moved_on_by_its_last_step():
    """With a gradient that does not depend on the parameters the corrections add up."""
    parameter = nn.Parameter(torch.tensor([3.0, -1.0]).double())
    plain = nn.Parameter(parameter.detach().clone())
    ours, theirs = (torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in (parameter, plain))
    method = ErrorFeedback([1], strength=0.5)
    for step in range(5):
        gradient = torch.tensor([1.0 + step, 2.0]).double()
        before = plain.detach().clone()
        parameter.grad, plain.grad = gradient.clone(), gradient.clone()
        method.step(ours)
        theirs.step()
        torch.testing.assert_close(parameter.detach(), plain.detach() - 0.5 * (before - plain.detach()))


@pytest.mark.parametrize(
    ("method", "mode", "kept"),
    [
        (ErrorFeedback, "cdp_v1", [1, 1, 1]),
        (ErrorFeedback, "cdp_v2", [1, 1, 0]),
        (Prediction, "cdp_v2", [2, 2, 0]),
        (Prediction, MATRIX, [4, 3, 0]),
        (Compensation, MATRIX, [3, 2, 0]),
        (Uncorrected, "cdp_v1", [0, 0, 0]),
    ],
)
def test_keeps_so_many_steps_of_each_stage_and_counts_their_bytes(method, mode, kept):
    engine = make_engine(mode, delay=method)
    trained(engine, make_batches(6))
    sizes = [sum(p.nbytes for p in stage.parameters() if p.requires_grad) for stage in make_stages()]
    assert engine.delay_bytes == sum(steps * size for steps, size in zip(kept, sizes, strict=True))
    assert engine.optimizer_bytes == sum(sizes), "momentum alone"


def test_stale_reads_of_one_version_share_one_copy_that_dies_with_them():
    engine = make_engine("cdp_v1", delay=Prediction)
    trained(engine, make_batches(4))
    versions = [content for value, content in engine._executor.values.items() if value.kind == "p"]
    assert len(versions) == 6 and not any(version._ahead for version in versions)
    old = min(versions, key=lambda version: version.number)
    assert old.read_in(old.number) is old
    ahead = old.read_in(old.number + 1)
    assert old.read_in(old.number + 1) is ahead and ahead.number == old.number
    del ahead
    assert not old._ahead


NAMED = ("dp", "cdp_v1", "cdp_v2")


@pytest.mark.parametrize(
    ("mode", "choices"),
    [
        *product((*NAMED, MATRIX), ({}, {"slot_order": "backward_first"})),
        *product(NAMED, [{"accumulate": 2}]),  # a matrix has a row for each of three micro-batches
    ],
    ids=str,
)
def test_copies_take_the_bytes_that_the_program_says(monkeypatch, mode, choices):
    meter, most, moved = ActivationMeter(), [0], Version._moved

    def metered(version, name, steps):
        tensor = moved(version, name, steps)
        if tensor is not version.tensors[name]:
            meter.hold(tensor)
            most[0] = max(most[0], meter.live_bytes)
        return tensor

    monkeypatch.setattr(Version, "_moved", metered)
    engine = make_engine(mode, delay=Prediction, **choices)
    trained(engine, make_batches(8))
    sizes = [sum(p.nbytes for p in stage.parameters() if p.requires_grad) for stage in make_stages()]
    assert most[0] == copied_bytes(Program(engine.schedule), sizes)
    assert (most[0] > 0) == (mode != "dp") and not meter.live_bytes


# ------------------------------------------------------------------------------------------------- resume, placements


@each_method
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["cdp_v1", "cdp_v2", MATRIX], ids=str)
def test_a_saved_run_goes_on_bitwise(method, mode, optimizer):
    delay, batches = METHODS[method][1], make_batches()
    whole = make_engine(mode, optimizer, delay=delay)
    expected = trained(whole, batches)
    first = make_engine(mode, optimizer, delay=delay)
    losses = trained(first, batches[:5])
    torch.save(first.state_dict(), file := io.BytesIO())
    file.seek(0)
    second = make_engine(mode, optimizer, delay=delay)
    second.load_state_dict(torch.load(file))
    assert losses + trained(second, batches[5:]) == expected
    small_runs.same(small_runs.flat(second.state_dict()), small_runs.flat(whole.state_dict()))


def test_a_checkpoint_of_another_method_is_refused():
    plain = make_engine("cdp_v1")
    trained(plain, make_batches(2))
    with pytest.raises(ValueError, match="is of the optimizer SGD, this engine has SGD with prediction"):
        make_engine("cdp_v1", delay=Prediction).load_state_dict(plain.state_dict())


CASES = [
    (mode, {"delay": delay})
    for mode in ("cdp_v1", "cdp_v2", small_runs.MATRIX)
    for delay in (ErrorFeedback, Prediction, Compensation)
]
CASES.append(("cdp_v2", {"delay": ErrorFeedback, "clip_norm": 0.05}))


@pytest.mark.parametrize("placement", small_runs.PLACEMENTS)
def test_every_placement_computes_what_one_device_computes(placement, tmp_path):
    by_ranks: dict[int, list] = {}
    for mode, choices in CASES:
        by_ranks.setdefault(small_runs.ranks_of(mode, placement, 2, 4), []).append((mode, choices))
    for ranks, cases in by_ranks.items():
        on_placement = [((mode, placement, 2, 4), choices) for mode, choices in cases]
        on_ranks = run_ranks(small_runs.train_each, ranks, on_placement, folder=tmp_path)
        for number, (mode, choices) in enumerate(cases):
            expected = small_runs.train(mode, "single_device", 2, 4, **choices)
            small_runs.check_same([each[number] for each in on_ranks], expected)


def test_modes_with_several_updates_a_step_are_refused():
    with pytest.raises(ValueError, match="delay=prediction counts training steps, but mode=async makes 2 updates"):
        small_runs.make_engine("async", "single_device", 2, 2, delay=Prediction)


def refused_on_shards():
    with pytest.raises(ValueError, match="delay=prediction keeps the last steps of whole stages, but placement zero"):
        small_runs.make_engine("dp", "zero", 2, 2, delay=Prediction, collectives=True)
    return True


def test_shards_are_refused(tmp_path):
    assert Schedule.build("dp", 2, 2, "zero", collectives=True).ranks == 2
    assert run_ranks(refused_on_shards, 2, folder=tmp_path) == [True, True]


# ------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("limit", [0.02, 0.3, 1e9])
@pytest.mark.parametrize(
    ("mode", "is_global"), [("dp", True), ("cdp_v1", True), ("cdp_v2", False), (MATRIX, False)], ids=str
)
def test_clipping_agrees_with_the_naive_rule(mode, is_global, limit):
    clipped = check_against_reference(mode, "sgd", Uncorrected, None, clip=(limit, is_global), clip_norm=limit)
    other = reference.train(
        make_stages(),
        F.cross_entropy,
        OPTIMIZERS["sgd"][0](),
        mode,
        3,
        make_batches(),
        factor,
        clip=(limit, not is_global),
    )
    assert (differs(clipped.thetas[-1], other.thetas[-1]) > 1e-4) == (limit < 1)


def test_clipping_and_prediction_together():
    check_against_reference("cdp_v1", "sgd", Prediction, reference.Prediction(), clip=(0.1, True), clip_norm=0.1)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2"])
def test_a_limit_that_is_never_reached_changes_no_bit(mode):
    plain, clipped = make_engine(mode), make_engine(mode, clip_norm=1e9)
    assert trained(plain, make_batches()) == trained(clipped, make_batches())


def test_clipping_survives_a_resume():
    batches, expected = make_batches(), make_engine("cdp_v1", clip_norm=0.05)
    losses = trained(expected, batches)
    first, second = make_engine("cdp_v1", clip_norm=0.05), make_engine("cdp_v1", clip_norm=0.05)
    begun = trained(first, batches[:5])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert begun + trained(second, batches[5:]) == losses


CLIPPED = {
    2: [("dp", "zero", 2, 4), ("cdp_v1", "zero", 2, 4), ("cdp_v1", "pipeline", 2, 4)],
    3: [("dp", "replicated", 3, 3), ("cdp_v1", "replicated", 3, 3), ("dp", "pipeline", 3, 3), ("cdp_v1", "zero", 3, 3)],
}


@pytest.mark.parametrize("ranks", CLIPPED)
def test_ranks_clip_together_by_the_norm_over_all_stages(ranks, tmp_path):
    choices = {"clip_norm": 0.05, "delay": Prediction}
    on_ranks = run_ranks(small_runs.train_each, ranks, [(each, choices) for each in CLIPPED[ranks]], folder=tmp_path)
    for number, (mode, _, n, s) in enumerate(CLIPPED[ranks]):
        expected = small_runs.train(mode, "single_device", n, s, **choices)
        small_runs.check_same([each[number] for each in on_ranks], expected)


def refused_with_collectives():
    with pytest.raises(
        ValueError, match="no rank in particular has a whole sum: use collectives=false placement=single"
    ):
        small_runs.make_engine("dp", "replicated", 2, 2, clip_norm=1.0, collectives=True)
    return True


def test_the_global_norm_is_refused_where_no_rank_completes_a_sum(tmp_path):
    assert run_ranks(refused_with_collectives, 2, folder=tmp_path) == [True, True]
