"""The meter against counts by hand; the executed trace against the simulated one and the closed forms."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import StageCompute, Version
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.engine.tracing import Tracer
from cdp_repro.launch import team as team_module
from cdp_repro.launch.team import Team
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import Program, Schedule

MODES = ("dp", "cdp_v1", "cdp_v2")
ORDERS = ("paper", "backward_first")
DOUBLE = 8


def sgd(params):
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def metered_costs(stages, loss_fn, inputs, targets):
    """Run one micro-batch through all stages, forward then backward; return what each takes and releases."""
    meter, computes, saved, taken, released = ActivationMeter(), [], [], [], []
    x = inputs.clone()
    for number, stage in enumerate(stages):
        is_last = number == len(stages) - 1
        parameters = {n: p.data.clone().requires_grad_(p.requires_grad) for n, p in stage.named_parameters()}
        buffers = {n: b.clone() for n, b in stage.named_buffers()}
        before = meter.live_bytes
        computes.append(StageCompute(stage, loss_fn if is_last else None))
        x, left = computes[-1].forward(
            Version(0, parameters), buffers, (x,), targets.clone() if is_last else None, meter
        )
        x.requires_grad_(left.edge is not None)
        saved.append(left)
        taken.append(meter.live_bytes - before)
    x = left = gradient = None
    for compute in reversed(computes):
        before = meter.live_bytes
        (gradient,) = compute.backward(saved.pop(), gradient, {})
        released.append(before - meter.live_bytes)
    assert meter.live_bytes == 0
    return StageCosts(
        tuple(taken),
        tuple(reversed(released)),
        tuple(sum(p.nbytes for p in stage.parameters()) for stage in stages),
        (0,) * len(stages),
        (0,) * len(stages),
    )


def uneven_stages(count):
    """Stages that save quite different things: BatchNorm, in-place ReLU, views, no parameters at all."""
    torch.manual_seed(0)
    kinds = [
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(inplace=True)),
        lambda: nn.Tanh(),
        lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LayerNorm(2), nn.Flatten()),
    ]
    return [kinds[number % 4]() for number in range(count)]


def batches_of(n, steps, micro=3, width=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(micro * n, width, generator=generator), torch.randint(4, (micro * n,), generator=generator))
        for _ in range(steps)
    ]


SIZES = [*((n, n) for n in range(1, 9)), *((n, 2 * n) for n in range(1, 9))]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", [*MODES, "matrix"])
def test_execution_is_what_simulate_says_slot_by_slot(size, order, mode):
    (n, s), steps = size, 3
    rule = [[1 + (i + j) % 2 for j in range(s)] for i in range(n)] if mode == "matrix" else mode
    stages, batches = uneven_stages(s), batches_of(n, steps)
    costs = metered_costs(stages, F.cross_entropy, batches[0][0][:3], batches[0][1][:3])
    assert len(set(costs.forward_bytes)) > 1 or s == 1
    engine = Engine(stages, F.cross_entropy, sgd, rule, workers=n, slot_order=order, traced_steps=steps)
    for _ in engine.run(batches):
        pass
    simulated = simulate(Program(Schedule.build(rule, n, s, slot_order=order)), costs, steps)
    assert engine.trace().records == simulated.records  # slots, actions with versions, live bytes, live versions
    assert engine.trace().activation_bytes_per_slot == simulated.activation_bytes_per_slot
    assert engine.trace().activation_peak_bytes_total > 0
    assert engine._tracer._meter.live_bytes == 0, "nothing is alive after the drain"


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_goes_on_over_a_drain_and_ends_with_its_steps(mode):
    batches = batches_of(2, 6)
    engine = Engine(uneven_stages(2), F.cross_entropy, sgd, mode, traced_steps=4)
    list(engine.run(batches[:2]))
    assert engine.is_tracing
    list(engine.run(batches[2:4]))
    assert not engine.is_tracing, "although no later step has ended the recording yet"
    list(engine.run(batches[4:]))
    slots = [record.slot for record in engine.trace().records]
    assert slots == list(range(len(slots)))
    steps = {a.micro_batch // 2 for record in engine.trace().records for a in record.actions if a.op.is_compute}
    assert steps == {0, 1, 2, 3}
    untraced = Engine(uneven_stages(2), F.cross_entropy, sgd, mode)
    list(untraced.run(batches))
    with pytest.raises(ValueError, match="nothing is traced with traced_steps=0: make the engine with traced_steps="):
        untraced.trace()
    for mine, theirs in zip(engine.model().parameters(), untraced.model().parameters(), strict=True):
        assert torch.equal(mine, theirs), "tracing changes no number"


def equal_stages(count, width=5):
    """Linear + Tanh whose saved bytes are equal: stage 0 keeps its input too, so its output is half as wide."""
    torch.manual_seed(0)
    widths = [width, width, *[2 * width] * (count - 1)]
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]


def mean_output(output, _):
    return output.mean()  # saves no tensor


@pytest.mark.parametrize("n", range(1, 9))
def test_equal_stages_give_the_closed_forms_of_the_peak_executed(n):
    micro, steps, width = 2, 3, 5
    costs = metered_costs(equal_stages(n), mean_output, torch.randn(micro, width), torch.zeros(micro))
    unit = micro * 2 * width * 4
    assert costs.forward_bytes == costs.backward_bytes == (unit,) * n

    def executed_peak(mode, order):
        engine = Engine(equal_stages(n), mean_output, sgd, mode, slot_order=order, traced_steps=steps)
        list(engine.run([(x, x[:, 0]) for x, _ in batches_of(n, steps, micro, width)]))
        return engine.trace().activation_peak_bytes_per_device

    for order in ORDERS:
        assert executed_peak("dp", order) == n * n * unit
    for mode in ("cdp_v1", "cdp_v2"):
        assert 2 * n * executed_peak(mode, "paper") == (n + 1) * n * n * unit  # (N+1)/2N of DP's
        # half of DP's; for odd N half a stage of one micro-batch more
        assert 2 * executed_peak(mode, "backward_first") == (n * n + n % 2) * unit


# -------------------------------------------------------------------------------------------------------- meter


def bytes_by_hooks(module, loss_fn, inputs, targets):
    """An independent count: the distinct storages that torch saves, less parameters and buffers."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        keep.append(tensor)  # so that no address is used twice
        return tensor

    keep = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_fn(module(inputs), targets)
    for tensor in (*module.parameters(), *module.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def metered(module, loss_fn, inputs, targets):
    costs = metered_costs([module], loss_fn, inputs, targets)
    assert costs.forward_bytes == costs.backward_bytes
    return costs.forward_bytes[0]


LABELS = torch.tensor([0, 1, 2, 0, 1])
HAND = {
    # Linear saves its input (and a view of its weight, which never counts)
    "linear": (lambda: nn.Linear(4, 8), (5, 4), mean_output, 5 * 4 * DOUBLE),
    # an in-place ReLU saves its output, in the storage of the Linear's
    "inplace": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True)),
        (5, 4),
        mean_output,
        5 * (4 + 8) * DOUBLE,
    ),
    # ReLU's output is the next Linear's input: once. Loss: log-softmax, targets, and the weight total (a scalar)
    "shared": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        (5, 4),
        F.cross_entropy,
        5 * (4 + 8 + 3) * DOUBLE + 5 * 8 + DOUBLE,
    ),
    # BatchNorm saves input, mean and inverse deviation (weight and running statistics never count)
    "batchnorm": (
        lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)),
        (5, 4),
        mean_output,
        5 * (4 + 6) * DOUBLE + 2 * 6 * DOUBLE,
    ),
    # views of one storage count once, and wholly
    "views": (
        lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 2)),
        (5, 4),
        mean_output,
        5 * 4 * DOUBLE,
    ),
    "nothing": (lambda: nn.Flatten(), (5, 4), mean_output, 0),
}


@pytest.mark.parametrize("name", HAND)
def test_known_numbers(name):
    make, shape, loss_fn, expected = HAND[name]
    module, inputs = make().double(), torch.randn(shape, dtype=torch.float64)
    assert metered(module, loss_fn, inputs, LABELS) == expected
    assert bytes_by_hooks(module, loss_fn, inputs, LABELS) == expected


class WeightView(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        return F.linear(x, self.weight.view(3, 2, 4)[:, 0]) * self.scale[:3]


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3)),
        nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Sigmoid(), nn.Flatten()),
        WeightView(),
    ],
    ids=["batchnorm", "layernorm", "conv", "weight view"],
)
def test_the_meter_agrees_with_an_independent_count(module):
    inputs = torch.randn(5, 4)
    counted = metered(module, F.cross_entropy, inputs, LABELS)
    assert counted == bytes_by_hooks(module, F.cross_entropy, inputs, LABELS) > 0


def test_bytes_between_stages_belong_to_who_keeps_them():
    """Two Linears: the hidden value is one tensor, alive from the first forward to the second backward."""
    costs = metered_costs([nn.Linear(4, 8), nn.Linear(8, 2)], mean_output, torch.randn(5, 4), LABELS)
    assert costs.forward_bytes == (5 * (4 + 8) * 4, 0)
    assert costs.backward_bytes == (5 * 4 * 4, 5 * 8 * 4)


def test_released_exactly_at_the_backward():
    meter = ActivationMeter()
    stage = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    version = Version(0, {n: p.data.clone().requires_grad_() for n, p in stage.named_parameters()})
    compute = StageCompute(stage, mean_output)
    kept = [compute.forward(version, {}, (torch.randn(5, 4),), LABELS, meter)[1] for _ in range(3)]
    one = 5 * (4 + 8) * 4
    for left in (3, 2, 1):
        assert meter.live_bytes == left * one
        compute.backward(kept.pop(0), None, {})
    assert meter.live_bytes == 0


def test_released_when_the_forward_is_dropped_without_a_backward():
    """Tanh's node saves its own output: packed with its graph it would keep itself alive for ever."""
    meter, stage = ActivationMeter(), nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    version = Version(0, {n: p.data.clone().requires_grad_() for n, p in stage.named_parameters()})
    kept = StageCompute(stage, None).forward(version, {}, (torch.randn(5, 4),), None, meter)
    assert meter.live_bytes == 5 * (4 + 8) * 4
    del kept
    assert meter.live_bytes == 0


def test_a_tensor_counts_until_its_storage_dies_and_once():
    meter, x = ActivationMeter(), torch.zeros(10)
    view = x[2:4]
    for tensor in (x, view, x.detach()):
        meter.hold(tensor)
    assert meter.live_bytes == 40
    del x, tensor
    assert meter.live_bytes == 40
    del view
    assert meter.live_bytes == 0
    for _ in range(100):  # addresses are used again
        meter.hold(torch.zeros(10))
        assert meter.live_bytes == 0


def test_mini_batches_and_metering_off_count_nothing():
    stage = nn.Linear(4, 2)
    version = Version(0, {n: p.data.clone().requires_grad_() for n, p in stage.named_parameters()})
    StageCompute(stage, mean_output).forward(version, {}, (torch.randn(5, 4),), LABELS, None)
    engine = Engine([nn.Linear(4, 4)], F.cross_entropy, sgd, "dp", traced_steps=0)
    list(engine.run(batches_of(1, 2)))
    assert engine._tracer._meter.live_bytes == 0


def test_the_clock_waits_for_compute_but_not_for_messages_that_have_streams_of_their_own(monkeypatch):
    """A receive is on its stream before its send exists: who waited for the whole device would wait for ever."""

    class Stream:
        waited = 0

        def synchronize(self):
            Stream.waited += 1

    def whole_device(*_):
        raise AssertionError("waits for receives, too")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", whole_device)
    team = Team(1, torch.device("cuda"), "a test")
    tracer = Tracer(Schedule.build("dp", 1), team, steps=1)
    tracer.now()
    assert Stream.waited == 1
    tracer.stop()
    tracer.now()
    assert Stream.waited == 1, "only while it traces"


class ChangesWhatIsSaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sigmoid(self.linear(x)).mul_(3)  # the backward of sigmoid needs its output


@pytest.mark.parametrize(("mode", "traced_steps"), [("dp", 0), ("dp", 3), ("ampnet", 0)])
def test_a_saved_tensor_that_is_changed_in_place_is_refused(mode, traced_steps):
    stages = [ChangesWhatIsSaved(), nn.Linear(4, 4)]
    engine = Engine(stages, F.cross_entropy, sgd, mode, traced_steps=traced_steps)
    batches = [(torch.randn(4, 4), torch.randint(4, (4,)))] * 2
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changes a tensor \[[24], 4\] in place"):
        list(engine.run(batches))


def offsets(machine):
    """The offset of this rank's clock, where ranks are on machines of these names."""
    before, team_module._machine = team_module._machine, lambda: machine[dist.get_rank()] if machine else before()
    try:
        return Team(3, torch.device("cpu"), "a test").clock_offset()
    finally:
        team_module._machine = before


def test_clocks_of_one_machine_are_one_clock(tmp_path):
    """A round trip would measure how busy the machine is."""
    assert run_ranks(offsets, 3, None, folder=tmp_path) == [0.0] * 3
    first, second, third = run_ranks(offsets, 3, ["a", "a", "b"], folder=tmp_path)
    assert first == second == 0 != third and abs(third) < 1
