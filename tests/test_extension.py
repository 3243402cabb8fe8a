"""A timeline, a rule and placements from outside: registered here, run, simulated, priced and drawn like our own.

No file of the package knows any of them. CONTRIBUTING.md walks through this file.
"""

from __future__ import annotations

import io
import json

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

from cdp_repro import Engine
from cdp_repro.engine.compute import Network
from cdp_repro.observe.figures import save_figure, timeline_figure
from cdp_repro.predict.pricing import Cluster, price
from cdp_repro.predict.profiling import profile_stages
from cdp_repro.predict.simulate import simulate
from cdp_repro.schedule import (
    MODES,
    Program,
    Schedule,
    ScheduleError,
    add_mode,
    add_placement,
    add_timeline,
)
from cdp_repro.schedule.placements import Placement
from cdp_repro.schedule.rules import Fresh, Rule
from cdp_repro.schedule.timelines import Timeline
from cdp_repro.trace import perfetto, write_perfetto

STEPS, MICRO_BATCH = 5, 3


class Spaced(Timeline):
    """Micro-batch i starts in slot (2c + 2) i: the cyclic order with two idle slots more between starts.

    N = S = 3, c = 1:

        slot      0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        worker 0  F0 F1 F2 B2 B1 B0                   F0 F1 F2 B2 B1 B0
        worker 1              F0 F1 F2 B2 B1 B0                   F0 F1
        worker 2                          F0 F1 F2 B2 B1 B0
    """

    name = "spaced"

    @property
    def distance(self) -> int:
        """2c + 2: even, so that a forward and a backward of one stage never meet in a slot."""
        return 2 * (self.sizes.stages // self.sizes.workers) + 2

    @property
    def period(self) -> int:
        return self.distance * self.sizes.turns

    def forward(self, i: int, j: int) -> int:
        return self.distance * i + j

    def backward(self, i: int, j: int) -> int:
        return self.distance * i + 2 * self.sizes.stages - 1 - j

    def check(self, placement: str) -> None:
        if self.sizes.stages % self.sizes.workers:
            raise ValueError(f"stages={self.sizes.stages} is not a multiple of workers={self.sizes.workers}")


class TwoLate(Rule):
    """The first half of the stages is two training steps late, the second half one."""

    def staleness(self, i: int, j: int) -> int:
        return 2 if 2 * j < self.sizes.stages else 1


class Reversed(Placement):
    """A pipeline with its stages in reverse order: stage j on rank S-1-j."""

    name = "reversed"

    def holders(self, stage: int) -> range:
        last = self.timeline.sizes.stages - 1
        return range(last - stage, last - stage + 1)


class Paired(Placement):
    """Each stage on two ranks, which take turns: micro-batch m computes stage j on rank 2j + m mod 2."""

    name = "paired"

    def holders(self, stage: int) -> range:
        return range(2 * stage, 2 * stage + 2)


def register() -> None:
    add_timeline(Spaced)
    add_mode("spaced_two_late", "spaced", TwoLate)
    add_mode("spaced_fresh", "spaced", Fresh)
    add_placement(Reversed)
    add_placement(Paired)


@pytest.fixture(autouse=True)
def registered(registries_restored):
    register()


def make_stages(count):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Tanh()) for _ in range(count)]
    return [block.double() for block in blocks]


def make_batches(micro_batches):
    draw = torch.Generator().manual_seed(1)
    size = micro_batches * MICRO_BATCH
    return [
        (torch.randn(size, 5, generator=draw, dtype=torch.float64), torch.randint(5, (size,), generator=draw))
        for _ in range(STEPS)
    ]


def train(mode, placement, n, s, k=1):
    """Train with a drain in the middle; return losses, model and trace. A rank registers for itself."""
    register()
    engine = Engine(
        make_stages(s), F.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), mode, placement,
        workers=n, accumulate=k, traced_steps=STEPS,
    )  # fmt: skip
    batches = make_batches(n * k)
    losses = [result.losses for part in (batches[:3], batches[3:]) for result in engine.run(part)]
    model = {name: tensor.clone() for name, tensor in engine.model().state_dict().items()}
    return losses, model, engine.trace()


def agree(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def costs_of(s, k_n):
    inputs, targets = make_batches(k_n)[0]
    return profile_stages(
        Network(make_stages(s), F.cross_entropy), inputs[:MICRO_BATCH].clone(), targets[:MICRO_BATCH].clone()
    )


@pytest.mark.parametrize(
    ("mode", "placement", "n", "s", "k"),
    [
        ("spaced_two_late", "reversed", 3, 3, 1),
        ("spaced_two_late", "paired", 2, 2, 2),
        ("spaced_two_late", "replicated", 3, 3, 1),
        ("spaced_two_late", "zero", 2, 4, 1),
        ("cdp_v2", "reversed", 2, 4, 1),
    ],
)
def test_what_is_registered_outside_computes_what_one_device_computes(tmp_path, mode, placement, n, s, k):
    schedule = Schedule.build(mode, n, s, placement, accumulate=k)
    outcomes = run_ranks(train, schedule.ranks, mode, placement, n, s, k, folder=tmp_path)
    losses, model, _ = train(mode, "single_device", n, s, k)
    assert outcomes[0][0] == losses
    for _, theirs, _ in outcomes:
        agree(theirs, model)
    executed, simulated = outcomes[0][2], simulate(Program(schedule), costs_of(s, n * k), 3)
    last = simulated.records[-1].slot
    assert [record for record in executed.records if record.slot <= last] == list(simulated.records)
    assert [message for message in executed.messages if message.slot <= last] == list(simulated.messages)


def test_numbers_depend_on_the_rule_and_not_on_the_timeline():
    matrix = Schedule.build("spaced_two_late", 2, 4).rule.matrix
    assert matrix == ((2, 2, 1, 1), (2, 2, 1, 1))
    spaced, cyclic = train("spaced_two_late", "single_device", 2, 4), train(matrix, "single_device", 2, 4)
    assert spaced[0] == cyclic[0]
    agree(spaced[1], cyclic[1])
    assert spaced[0] != train("cdp_v1", "single_device", 2, 4)[0]


def test_a_rule_that_the_timeline_cannot_serve_is_refused_with_the_slot_from_which_it_could():
    with pytest.raises(ScheduleError, match=r"Staleness 0 of \(micro-batch 0, stage 0\) .* exists from slot 14 on"):
        Program(Schedule.build("spaced_fresh", 3, 3))


def test_it_has_a_price():
    prices = {}
    for placement in ("single_device", "reversed"):
        program = Program(Schedule.build("spaced_two_late", 3, 3, placement))
        prices[placement] = price(program, costs_of(3, 3), Cluster.equal(3), optimizer_states=[1] * 3)
    assert {placement: found.devices for placement, found in prices.items()} == {"single_device": 1, "reversed": 3}
    assert all(found.busy_seconds == 18 for found in prices.values())  # 3 micro-batches, 3 stages, there and back
    assert prices["single_device"].step_seconds == 18  # one device has no idle slots, whatever the timeline
    assert prices["reversed"].step_seconds == program.schedule.slots_per_step == 12


def test_it_is_drawn(tmp_path):
    program = Program(Schedule.build("spaced_two_late", 3, 3, "reversed"))
    save_figure(
        timeline_figure({"spaced": program.slots(2)}, {"spaced": program.schedule.timeline.lanes}, stages=3),
        tmp_path / "timeline.svg",
    )
    assert (tmp_path / "timeline.svg").read_text().count("worker") >= 3
    trace = simulate(program, costs_of(3, 3), 2)
    write_perfetto(trace, file := io.StringIO())
    assert json.loads(file.getvalue()) == perfetto(trace)
    names = {event["name"] for event in perfetto(trace)["traceEvents"]}
    assert {"F0.m0@v0", "S x1.m0>1", "U2@v2"} <= names


def test_a_mode_whose_timeline_nobody_has_entered_is_refused():
    add_mode("lost", "nowhere", TwoLate)
    try:
        with pytest.raises(ValueError, match="has the timeline 'nowhere', which nobody has entered: call add_timeline"):
            Schedule.build("lost", 2)
    finally:
        del MODES["lost"]
