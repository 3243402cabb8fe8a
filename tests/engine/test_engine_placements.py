"""Every placement computes, bitwise, what one device computes: real processes, float64, tensor by tensor."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_runs import mixed_stages
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.engine.mailbox import Pending
from cdp_repro.models import ModelSpec, build_model, cut
from cdp_repro.predict.partition import partition
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, Program, Schedule
from cdp_repro.schedule.summation.exchange_in_parts import leaves_in_parts
from cdp_repro.schedule.values import parameters

PLACEMENTS = ("replicated", "zero", "model_parallel", "pipeline", "parameter_server")
STEPS, DRAIN = 5, 3
MATRIX = "matrix"
VIT, UNEVEN, ONE_VALUE = "test_vit", "uneven", "one value"


def uneven_stages(count):
    """Between small stages one whose gradients leave in parts."""
    torch.manual_seed(0)
    large = nn.Sequential(nn.Linear(5, 600), nn.Tanh(), nn.Linear(600, 700), nn.BatchNorm1d(700), nn.Linear(700, 5))
    stages = [nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh()) for _ in range(count - 1)]
    return [stage.double() for stage in (*stages[: count // 2], large, *stages[count // 2 :])]


def stages_of_one_value(count):
    """Each has one parameter of one value, of which all ranks but one hold an empty shard."""
    return [nn.PReLU(init=0.1 + 0.1 * number).double() for number in range(count)]


def model_stages(name, count):
    """The blocks of a real network, cut by their parameters."""
    dropout = 0.1 if name == VIT else 0.0
    model = build_model(
        name, ModelSpec(input_shape=(3, 16, 16), classes=5, hidden=8, depth=3, dropout=dropout), seed=0
    ).double()
    costs = [sum(p.numel() for p in block.parameters()) for block in model]
    return cut(model, partition(costs, count))


def make_stages(kind, count):
    own = {"linear": mixed_stages, UNEVEN: uneven_stages, ONE_VALUE: stages_of_one_value}
    return own[kind](count) if kind in own else model_stages(kind, count)


def make_batches(kind, micro_batches, micro=3):
    generator = torch.Generator().manual_seed(1)
    shape = (5,) if kind in ("linear", UNEVEN, ONE_VALUE) else (3, 16, 16)
    size = micro_batches * micro
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=torch.float64),
            torch.randint(5, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def rule(mode, n, s):
    if mode != MATRIX:
        return mode
    return [[1 + (2 * i + j) % 3 for j in range(s)] for i in range(n)]


def make_engine(kind, mode, placement, n, s, r=1, **settings):
    return Engine(
        make_stages(kind, s),
        F.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        rule(mode, n, s),
        placement,
        workers=n,
        replicas=r,
        seed=3,
        learning_rate_factor=lambda step: 0.5 if step >= 2 else 1.0,
        **settings,
    )


def train(kind, mode, placement, n, s, r=1, settings=None):
    """Train with a drain in the middle; return all that can be compared."""
    engine = make_engine(kind, mode, placement, n, s, r, traced_steps=STEPS, **(settings or {}))
    batches = make_batches(kind, n * r)
    losses = []
    for part in (batches[:DRAIN], batches[DRAIN:]):
        losses += [result.losses for result in engine.run(part)]
    trace = engine.trace()
    model = {name: tensor.clone() for name, tensor in engine.model().state_dict().items()}
    return losses, model, trace, engine.ledger_reads, engine.state_dict()


def same(mine, theirs):
    assert mine.keys() == theirs.keys()
    differing = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not differing, f"{differing} differ"


def flat(state, prefix=""):
    """All tensors and numbers of nested state, by their path."""
    if isinstance(state, dict):
        return {k: v for key, part in state.items() for k, v in flat(part, f"{prefix}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for key, part in enumerate(state) for k, v in flat(part, f"{prefix}/{key}").items()}
    return (
        {prefix: state if isinstance(state, torch.Tensor) else torch.tensor(float(state or 0))}
        if (isinstance(state, (torch.Tensor, int, float)) or state is None)
        else {}
    )


def check(tmp_path, kind, mode, placement, n, s, r=1, settings=None):
    schedule = Schedule.build(rule(mode, n, s), n, s, placement, replicas=r, **(settings or {}))
    outcomes = run_ranks(train, schedule.ranks, kind, mode, placement, n, s, r, settings, folder=tmp_path)
    alone = {name: value for name, value in (settings or {}).items() if name != "servers"}
    check_outcomes(outcomes, train(kind, mode, "single_device", n, s, r, alone))
    return schedule, outcomes


def check_outcomes(outcomes, alone):
    """The ranks have computed, bitwise, what one device has."""
    losses, model, _, reads, state = alone
    assert all(torch.isfinite(torch.tensor(losses)).flatten())
    assert outcomes[0][0] == losses
    for _, theirs, *_ in outcomes:
        same(theirs, model)
    assert sum(outcome[3] for outcome in outcomes) == reads
    same(flat(outcomes[0][4]), flat(state))


@contextmanager
def naming(case):
    """Name the case of a comparison that fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"of {case}")
        raise


def check_trace(trace, schedule, n, s, r=1, kind="linear"):
    """Every record and message of the first steps is as simulated."""
    stages, batches = make_stages(kind, s), make_batches(kind, n * r)
    costs = profile_stages(Network(stages, F.cross_entropy), *(part[:3].clone() for part in batches[0]))
    simulated = simulate(Program(schedule), costs, DRAIN)
    end = max(record.slot for record in simulated.records)
    assert [m for m in trace.messages if m.slot <= end] == list(simulated.messages)
    records = [record for record in trace.records if record.slot <= end]
    assert records == list(simulated.records), next(
        (a, b) for a, b in zip(records, simulated.records, strict=False) if a != b
    )


def train_each(modes, placement, n):
    return [train("linear", mode, placement, n, n) for mode in modes]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_computes_what_one_device_computes(tmp_path, placement, n):
    """Modes that run on as many ranks need processes once."""
    schedules = {mode: Schedule.build(rule(mode, n, n), n, n, placement) for mode in ("dp", "cdp_v1", "cdp_v2", MATRIX)}
    for ranks in {schedule.ranks for schedule in schedules.values()}:
        modes = [mode for mode, schedule in schedules.items() if schedule.ranks == ranks]
        found = run_ranks(train_each, ranks, modes, placement, n, folder=tmp_path)
        for mode, *outcomes in zip(modes, *found, strict=True):
            with naming(mode):
                check_outcomes(outcomes, train("linear", mode, "single_device", n, n))
                check_trace(outcomes[0][2], schedules[mode], n, n)


def close(mine, theirs):
    """A library adds gradients in an order of its own: float64, values of about 1."""
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "s", "r"), [(2, 2, 1), (3, 3, 1), (4, 4, 1), (2, 4, 2)])
@pytest.mark.parametrize("placement", COLLECTIVE_PLACEMENTS)
def test_collectives_compute_what_one_device_computes_but_for_the_order_of_sums(tmp_path, placement, n, s, r):
    schedule = Schedule.build("dp", n, s, placement, replicas=r, collectives=True)
    outcomes = run_ranks(
        train, schedule.ranks, "linear", "dp", placement, n, s, r, {"collectives": True}, folder=tmp_path
    )
    losses, model, _, reads, state = train("linear", "dp", "single_device", n, s, r)
    torch.testing.assert_close(torch.tensor(outcomes[0][0]), torch.tensor(losses), rtol=1e-10, atol=1e-12)
    for _, theirs, *_ in outcomes:
        close(theirs, model)
        same(theirs, outcomes[0][1])  # what ranks hold never drifts apart
    assert sum(outcome[3] for outcome in outcomes) == reads
    close(flat(outcomes[0][4]), flat(state))
    check_trace(outcomes[0][2], schedule, n, s, r)


def test_a_rank_whose_shard_is_empty_knows_the_version_and_sends_what_is_simulated(tmp_path):
    schedule = Schedule.build("dp", 2, 2, "zero", collectives=True)
    arguments = ("zero", 2, 2, 1, {"collectives": True})
    outcomes = run_ranks(train, schedule.ranks, ONE_VALUE, "dp", *arguments, folder=tmp_path)
    check_trace(outcomes[0][2], schedule, 2, 2, kind=ONE_VALUE)
    close(outcomes[1][1], train(ONE_VALUE, "dp", "single_device", 2, 2)[1])


@pytest.mark.parametrize(
    ("mode", "n", "s", "r", "servers"), [("dp", 2, 3, 1, 2), ("cdp_v2", 2, 4, 1, 3), ("cdp_v1", 1, 2, 2, 2)]
)
def test_several_servers_compute_what_one_device_computes(tmp_path, mode, n, s, r, servers):
    schedule, outcomes = check(tmp_path, "linear", mode, "parameter_server", n, s, r, {"servers": servers})
    assert len(outcomes) == n * r + servers
    check_trace(outcomes[0][2], schedule, n, s, r)
    assert all(record.rank < n * r for record in outcomes[0][2].records if any(a.op.is_compute for a in record.actions))


@pytest.mark.parametrize("kind", ["resnet8", VIT])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_real_networks_agree_too(tmp_path, placement, kind):
    check(tmp_path, kind, "cdp_v2", placement, 2, 2)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", MATRIX])
@pytest.mark.parametrize(("placement", "n", "s", "r"), [("replicated", 2, 4, 1), ("pipeline", 2, 2, 2)])
def test_two_holders_exchange_gradients_with_more_stages_and_replicas_too(tmp_path, placement, n, s, r, mode):
    check(tmp_path, "linear", mode, placement, n, s, r)


@pytest.mark.parametrize("mode", ["dp", "cdp_v1", "cdp_v2", MATRIX])
@pytest.mark.parametrize(("n", "s", "r"), [(2, 2, 1), (2, 6, 1), (1, 2, 2)])
def test_gradients_that_leave_in_parts_compute_what_one_device_computes(tmp_path, n, s, r, mode):
    _, outcomes = check(tmp_path, UNEVEN, mode, "replicated", n, s, r)
    stages, batches = make_stages(UNEVEN, s), make_batches(UNEVEN, n * r)
    costs = profile_stages(Network(stages, F.cross_entropy), *(part[:3].clone() for part in batches[0]))
    schedule = Schedule.build(rule(mode, n, s), n, s, "replicated", replicas=r, gradient_bytes=costs.gradient_bytes)
    trace, simulated = outcomes[0][2], simulate(Program(schedule), costs, DRAIN)
    in_parts = any(message.value.parts > 1 for message in trace.messages)
    assert in_parts is leaves_in_parts(schedule)
    assert in_parts or mode in ("cdp_v1", MATRIX)
    end = max(record.slot for record in simulated.records)
    assert [m for m in trace.messages if m.slot <= end] == list(simulated.messages)


class Unused(nn.Module):
    """Has many parameters that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(1500, 1500)

    def forward(self, inputs):
        return self.used(inputs)


def run_with_unused(mode):
    """The messages of a run, the parts among its parameters' gradients, and whether parameters are the engine's own."""
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8), Unused()]
    engine = Engine(stages, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), mode, "replicated", traced_steps=9)
    batches = [(torch.randn(6, 8), torch.randint(8, (6,))) for _ in range(4)]
    assert len([*engine.run(batches)]) == 4
    tensors = engine._executor.values[parameters(0, engine.step)].tensors
    shared = all(engine.model()[0].get_parameter(name).data_ptr() == t.data_ptr() for name, t in tensors.items())
    mailbox = engine._executor.mailbox
    return engine.trace().messages, shared, (mailbox._leaving, mailbox._arriving)


def test_parts_of_gradients_that_the_loss_does_not_depend_on_are_empty_and_the_model_copies_nothing(tmp_path):
    """Trained parameters decide on parts, before anything runs; what is sent are the gradients that there are."""
    stages = [nn.Linear(8, 8), Unused()]
    costs = profile_stages(Network(stages, F.cross_entropy), torch.randn(3, 8), torch.randint(8, (3,)))
    trained = [sum(parameter.nbytes for parameter in stage.parameters()) for stage in stages]
    schedule = Schedule.build("cdp_v2", 2, 2, "replicated", gradient_bytes=trained)
    assert leaves_in_parts(schedule) and not leaves_in_parts(Schedule.from_spec(schedule.spec, costs.gradient_bytes))
    outcomes = run_ranks(run_with_unused, 2, "cdp_v2", folder=tmp_path)
    assert list(outcomes[0][0]) == list(simulate(Program(schedule), costs, 4).messages)
    assert all(shared and not any(open_) for _, shared, open_ in outcomes)


def bytes_in_modules(placement):
    """Bytes of each stage's parameters in the modules, before and after a run, and after the model was asked for."""
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8) for _ in range(2)]
    engine = Engine(stages, F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "cdp_v2", placement)
    sizes = [[sum(p.nbytes for p in stage.parameters()) for stage in stages]]
    for ask in (lambda: [*engine.run([(torch.randn(6, 8), torch.randint(8, (6,)))])], engine.model):
        ask()
        sizes.append([sum(p.nbytes for p in stage.parameters()) for stage in stages])
    return sizes


@pytest.mark.parametrize("placement", ["replicated", "pipeline", "zero"])
def test_a_rank_keeps_no_parameters_of_stages_that_it_does_not_hold(placement, tmp_path):
    whole = 4 * (8 * 8 + 8)
    for rank, found in enumerate(run_ranks(bytes_in_modules, 2, placement, folder=tmp_path)):
        held = [whole * (placement == "replicated" or stage == rank) for stage in range(2)]
        assert found == [[whole, whole], held, [whole, whole]]


def losses_known(placement, replicas):
    engine = make_engine("linear", "cdp_v2", placement, 2, 2, replicas)
    return [
        [not math.isnan(loss) for loss in result.losses]
        for result in engine.run(make_batches("linear", 2 * replicas)[:1])
    ]


@pytest.mark.parametrize(
    ("placement", "replicas", "known"),
    [
        ("replicated", 1, [[True, True], [False, True]]),
        ("pipeline", 1, [[True, True], [True, True]]),
        ("replicated", 2, [[True, True], [False, False], [False, False], [False, False]]),
    ],
)
def test_losses_are_known_on_rank_0_and_on_a_rank_that_computes_all_of_one(placement, replicas, known, tmp_path):
    found = run_ranks(losses_known, len(known), placement, replicas, folder=tmp_path)
    assert found == [[each] for each in known]


def kept_bytes(outgoing):
    """Bytes of the memory that is kept for what may not have been sent, in which several buffers may lie."""
    kept = (transfer.buffer.untyped_storage() for _, transfer in outgoing._transfers)
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def left_over(kind, mode, placement, settings):
    engine = make_engine(kind, mode, placement, 2, 2, **settings)
    for part in (make_batches(kind, 2)[:DRAIN], make_batches(kind, 2)[DRAIN:]):
        for _ in engine.run(part):
            pass
    mailbox, values = engine._executor.mailbox, engine._executor.values
    outgoing = mailbox._delivery._outgoing
    under_way = sum(isinstance(content, Pending) for content in values.values())
    too_many = values.keys() - set(engine.schedule.held_after(engine.step)[engine.rank])
    return kept_bytes(outgoing), *map(len, (mailbox._leaving, mailbox._arriving, too_many)), under_way


@pytest.mark.parametrize(
    ("kind", "mode", "placement", "settings"),
    [(UNEVEN, "cdp_v2", "replicated", {}), (UNEVEN, "dp", "replicated", {}), ("linear", "dp", "zero", {}),
     ("linear", "dp", "zero", {"collectives": True}), ("linear", "dp", "replicated", {"collectives": True})],
)  # fmt: skip
def test_a_drain_leaves_nothing_on_its_way(tmp_path, kind, mode, placement, settings):
    assert run_ranks(left_over, 2, kind, mode, placement, settings, folder=tmp_path) == [(0, 0, 0, 0, 0)] * 2


def most_kept(mode, placement, steps):
    """The most bytes kept for messages that may not have been sent, and losses, after any training step."""
    engine = make_engine("linear", mode, placement, 2, 2)
    batches = make_batches("linear", 2)
    kept = [
        (kept_bytes(engine._executor.mailbox._delivery._outgoing), kept_bytes(engine._executor._losses._outgoing))
        for _ in engine.run(batches[step % len(batches)] for step in range(steps))
    ]
    dist.barrier()
    return tuple(map(max, zip(*kept, strict=True)))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", ["dp", "cdp_v1"])
def test_what_has_been_sent_is_not_kept_until_the_drain(tmp_path, placement, mode):
    ranks = Schedule.build(mode, 2, placement=placement).ranks
    few, many = (run_ranks(most_kept, ranks, mode, placement, steps, folder=tmp_path) for steps in (8, 24))
    assert few == many
    assert any(sending for sending, _ in many), "there is something to send"


def train_and_leave(mode):
    """Rank 0 takes its time for every step, others leave as soon as they are done."""
    engine = make_engine("linear", mode, "replicated", 2, 2)
    losses = []
    for result in engine.run(make_batches("linear", 2)):
        losses.append(result.losses)
        if engine.rank == 0:
            time.sleep(0.2)
    if engine.rank:
        dist.destroy_process_group()
    return losses


def test_a_rank_that_is_done_has_sent_its_losses(tmp_path):
    outcomes = run_ranks(train_and_leave, 2, "cdp_v1", folder=tmp_path)
    losses, *_ = train("linear", "cdp_v1", "single_device", 2, 2)
    assert outcomes[0] == losses
