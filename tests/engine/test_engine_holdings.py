"""Ranks hold the same from the start, in the same engine, and go on from a state as if they had not been stopped."""

from __future__ import annotations

import copy
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import make_batches, make_engine
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.delay import ErrorFeedback, Prediction
from cdp_repro.schedule.values import Kind

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def leave(stage):
    pass


def raise_a_last_bit(stage):
    stage.extra.data[1] *= 1 + torch.finfo(stage.extra.dtype).eps


def swap(stage):
    stage.extra.data, stage.further.data = stage.further.data, stage.extra.data


def own_stages(count, kind, change):
    """Stages with two parameters more; on rank 1, `change` is done to stage 1."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 5, dtype=torch.float64)) for _ in range(count)]
    for number, stage in enumerate(stages):
        stage.register_parameter("extra", nn.Parameter(torch.arange(1, 4).to(kind)))
        stage.register_parameter("further", nn.Parameter(torch.arange(2, 5).to(kind)))
        if number == 1 and dist.get_rank():
            change(stage)
    return stages


def train(placement, kind, change):
    engine = make_engine("cdp_v2", placement, 2, 2, lambda count: own_stages(count, kind, change))
    return [result.losses for result in engine.run(make_batches(2, engine.schedule.micro_batches))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [raise_a_last_bit, swap])
def test_ranks_that_hold_a_stage_with_other_parameters_are_refused(tmp_path, kind, change):
    refusal = r"rank 1 has other parameters of stage 1 than rank 0, such as extra.*manual_seed"
    with pytest.raises(AssertionError, match=refusal):
        run_ranks(train, 2, "replicated", kind, change, folder=tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_the_same_parameters_train(tmp_path, kind):
    run_ranks(train, 2, "replicated", kind, leave, folder=tmp_path)


def test_parameters_that_only_one_rank_holds_may_differ_before_the_others_drop_them(tmp_path):
    run_ranks(train, 2, "pipeline", torch.float32, raise_a_last_bit, folder=tmp_path)


def train_with(placement, own):
    """On rank 1, with settings of its own."""
    settings = {"mode": "cdp_v2", "lr": 0.1, "seed": 0, "clip_norm": None} | (own if dist.get_rank() else {})
    torch.manual_seed(0)
    stages = [nn.Linear(5, 5, dtype=torch.float64) for _ in range(2)]
    mode, rate, options = settings.pop("mode"), settings.pop("lr"), settings.pop("options", {})
    make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[settings.pop("kind", "sgd")]
    engine = Engine(stages, F.cross_entropy, lambda p: make(p, lr=rate, **options), mode, placement, **settings)
    return [result.losses for result in engine.run(make_batches(3, engine.schedule.micro_batches))]


@pytest.mark.parametrize(
    ("own", "refusal"),
    [
        ({"mode": "cdp_v1"}, "rank 1 has made an engine with mode=cdp_v1, rank 0 with mode=cdp_v2: make the same"),
        (
            {"mode": [[1, 1], [1, 0]]},
            r"rank 1 has made an engine with mode=\(\(1, 1\), \(1, 0\)\), rank 0 with mode=",
        ),
        ({"seed": 1}, "rank 1 has made an engine with seed=1, rank 0 with seed=0"),
        ({"clip_norm": 2.0}, "rank 1 has made an engine with clip_norm=2.0, rank 0 with clip_norm=None"),
        ({"lr": 0.2}, r"rank 1 has for stage 0 the optimizer SGD .*'lr': 0.2.*, rank 0 SGD .*'lr': 0.1"),
        ({"kind": "adam"}, "rank 1 has for stage 0 the optimizer Adam"),
        ({"options": {"maximize": True}}, "rank 1 has for stage 0 the optimizer SGD .*'maximize': True"),
    ],
    ids=str,
)
def test_ranks_that_make_other_engines_are_refused(tmp_path, own, refusal):
    with pytest.raises(AssertionError, match=refusal):
        run_ranks(train_with, 2, "replicated", own, folder=tmp_path)


def train_after_an_empty_run():
    """What ranks tell each other is of the run that begins: another state may have come since an empty one."""
    engine, other = (make_engine("cdp_v2", "replicated", 2, 2) for _ in range(2))
    list(other.run(make_batches(2, 2)))
    state = [copy.deepcopy(other.state_dict())]
    dist.broadcast_object_list(state, 0)
    assert list(engine.run([])) == []
    engine.load_state_dict(state[0])
    time.sleep(0.5 * (dist.get_rank() == 0))
    return [result.losses for result in engine.run(make_batches(2, 2))][-1]


def test_ranks_compare_what_they_have_when_a_run_begins(tmp_path):
    losses, _ = run_ranks(train_after_an_empty_run, 2, folder=tmp_path)
    alone = make_engine("cdp_v2", "single_device", 2, 2)
    list(alone.run(make_batches(2, 2)))
    assert losses == [result.losses for result in alone.run(make_batches(2, 2))][-1], "it went on from the state loaded"


def train_from_a_state(placement, choices):
    """Ranks begin with parameters of their own, which nothing reads: all load one state."""
    first = make_engine("dp", placement, 2, 2, stages=plain_stages, **choices)
    list(first.run(make_batches(2, 2)))
    state = [copy.deepcopy(first.state_dict())]
    dist.broadcast_object_list(state, 0)
    second = make_engine("dp", placement, 2, 2, stages=stages_of_this_rank, **choices)
    second.load_state_dict(state[0])
    return [[result.losses for result in engine.run(make_batches(2, 2))] for engine in (first, second)]


def plain_stages(count, seed=0):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def stages_of_this_rank(count):
    return plain_stages(count, dist.get_rank())


@pytest.mark.parametrize(("placement", "choices"), [("replicated", {}), ("zero", {}), ("zero", {"collectives": True})])
def test_ranks_that_have_loaded_one_state_go_on_from_it_whatever_they_had(tmp_path, placement, choices):
    (one, other), _ = run_ranks(train_from_a_state, 2, placement, choices, folder=tmp_path)
    assert one == other


def test_stages_that_only_one_rank_holds_may_have_another_rate(tmp_path):
    run_ranks(train_with, 2, "pipeline", {"lr": 0.2}, folder=tmp_path)


def refusal_of(optimizer, choices):
    with pytest.raises(ValueError) as refused:
        Engine([nn.Linear(4, 4), nn.Linear(4, 4)], F.cross_entropy, optimizer, workers=2, **choices)
    return str(refused.value)


def test_a_method_that_a_schedule_cannot_serve_is_refused_by_ranks_that_hold_no_stage_too(tmp_path):
    choices = {"mode": "async", "placement": "parameter_server", "delay": ErrorFeedback}
    said = run_ranks(refusal_of, 3, sgd, choices, folder=tmp_path)
    assert len({*said}) == 1 and "delay=error_feedback counts training steps, but mode=async" in said[0]


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_an_optimizer_of_matrices_cannot_have_shards(tmp_path, kind):
    choices = {"mode": "dp", "placement": "zero", "collectives": True}
    for said in run_ranks(refusal_of, 2, partial(of_weights, kind), choices, folder=tmp_path):
        assert said.startswith(f"{kind} computes with whole matrices, of which a rank that holds shards has pieces")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def of_weights(kind, parameters):
    """Muon takes matrices only, so biases go to nobody: it is refused before that is."""
    return getattr(torch.optim, kind)([each for each in parameters if each.ndim == 2], lr=0.1)


class Transposed(nn.Module):
    """Its matrix lies in memory column by column."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size).t())
        self.register_buffer("mask", (torch.rand(size, size) < 0.9).double().t())

    def forward(self, inputs):
        return torch.tanh(inputs @ (self.weight * self.mask))


def stages_in_other_layouts(kind):
    torch.manual_seed(0)
    if kind == "transposed":
        return [nn.Linear(4, 4).double(), Transposed(4).double()]
    filters = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1, groups=4)
    stages = (
        nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2))),
        nn.Sequential(*filters, nn.Flatten(), nn.Linear(16, 4)),
    )
    return [stage.double().to(memory_format=torch.channels_last) for stage in stages]


def engine_in_other_layouts(kind, placement, **choices):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    stages = stages_in_other_layouts(kind)
    return Engine(stages, F.cross_entropy, adamw, "cdp_v1", placement, workers=2, **choices)


def batches_of_vectors(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


def strides_and_state(engine):
    strides = [parameter.stride() for parameter in engine.model().parameters()]
    return strides, [tensor.clone() for tensor in engine.model().state_dict().values()]


def cut_in_other_layouts(kind):
    """Twenty steps at once; and three, the state on rank 0, and seventeen more in a new engine."""
    whole, first, rest = (engine_in_other_layouts(kind, "pipeline") for _ in range(3))
    list(whole.run(batches_of_vectors(20)))
    list(first.run(batches_of_vectors(3)))
    state = [copy.deepcopy(first.state_dict())]
    dist.broadcast_object_list(state, 0)
    rest.load_state_dict(state[0])
    list(rest.run(batches_of_vectors(20)[3:]))
    return [(*strides_and_state(engine), strides_of_buffers(engine)) for engine in (whole, rest)]


def strides_of_buffers(engine):
    sets = (content for value, content in engine._executor.values.items() if value.kind == Kind.BUFFERS)
    return [buffer.stride() for each in sets for buffer in each.values()]


@pytest.mark.parametrize("kind", ["transposed", "conv"])
def test_a_state_of_several_ranks_is_loaded_as_parameters_lie_in_memory(tmp_path, kind):
    """Between ranks it loses how tensors lie; in another layout, kernels add in another order."""
    for whole, rest in run_ranks(cut_in_other_layouts, 2, kind, folder=tmp_path):
        (strides, tensors, of_buffers), (theirs, loaded, of_loaded) = whole, rest
        assert (theirs, of_loaded) == (strides, of_buffers)
        assert all(map(torch.equal, tensors, loaded))


def predict_in_other_layouts(placement):
    engine = engine_in_other_layouts("conv", placement, delay=Prediction)
    list(engine.run(batches_of_vectors(20)))
    return strides_and_state(engine)


@pytest.mark.parametrize("placement", ["zero", "replicated"])
def test_predicted_parameters_lie_in_memory_as_parameters_do(tmp_path, placement):
    strides, tensors = predict_in_other_layouts("single_device")
    for theirs, others in run_ranks(predict_in_other_layouts, 2, placement, folder=tmp_path):
        assert theirs == strides
        assert all(map(torch.equal, tensors, others))
