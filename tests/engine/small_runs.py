"""Small engines, the same in each process, and what can be compared of them: for tests of what ranks compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from cdp_repro import Engine
from cdp_repro.schedule import Schedule

MATRIX = "matrix"
MODES = ("dp", "cdp_v1", "cdp_v2", MATRIX)
PLACEMENTS = ("replicated", "zero", "model_parallel", "pipeline")


def mixed_stages(count):
    """BatchNorm, dropout, a stage without parameters, and one with a frozen parameter, in float64."""
    torch.manual_seed(0)
    kinds = [
        lambda: nn.Sequential(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh()),
        lambda: nn.Sequential(nn.Tanh()),
        lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)),
    ]
    stages = [kinds[number % 4]().double() for number in range(count)]
    for stage in stages[3::4]:
        stage[0].bias.requires_grad_(False)
    return stages


def make_batches(count, micro_batches, micro=3):
    generator = torch.Generator().manual_seed(1)
    rows = micro_batches * micro
    return [
        (
            torch.randn(rows, 5, generator=generator, dtype=torch.float64),
            torch.randint(5, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def rule(mode, n, s, k=1):
    """The mode, or a staleness matrix that every timeline can serve, of 1 to 3 steps."""
    return [[1 + (2 * i + j) % 3 for j in range(s)] for i in range(k * n)] if mode == MATRIX else mode


def make_engine(mode, placement, n, s, stages=mixed_stages, **choices):
    return Engine(
        stages(s),
        F.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        rule(mode, n, s, choices.get("accumulate", 1)),
        placement,
        workers=n,
        seed=3,
        learning_rate_factor=lambda step: 0.5 if step >= 2 else 1.0,
        **choices,
    )


def ranks_of(mode, placement, n, s, **choices):
    return Schedule.build(rule(mode, n, s, choices.get("accumulate", 1)), n, s, placement, **choices).ranks


def flat(state, prefix=""):
    """All tensors and numbers of nested state, by their path."""
    if isinstance(state, dict):
        return {k: v for key, part in state.items() for k, v in flat(part, f"{prefix}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return {k: v for key, part in enumerate(state) for k, v in flat(part, f"{prefix}/{key}").items()}
    if isinstance(state, torch.Tensor):
        return {prefix: state.clone()}
    return {prefix: torch.tensor(float(state or 0))} if isinstance(state, (int, float)) or state is None else {}


def outcome(engine, losses):
    """What can be compared: losses, the model, the canonical state (on rank 0), and the reads in the ledger."""
    model = {name: tensor.clone() for name, tensor in engine.model().state_dict().items()}
    return losses, model, flat(engine.state_dict()), engine.ledger_reads


def train(mode, placement, n, s, pieces=(3, 2), **choices):
    """Train in pieces, with a drain after each."""
    engine = make_engine(mode, placement, n, s, **choices)
    batches = iter(make_batches(sum(pieces), engine.schedule.micro_batches))
    losses = []
    for piece in pieces:
        losses += [result.losses for result in engine.run([next(batches) for _ in range(piece)])]
    assert engine.step == sum(pieces)
    return outcome(engine, losses)


def train_each(cases):
    """Train one engine after the other in the same processes. `cases`: (arguments, choices) of `train`."""
    return [train(*arguments, **choices) for arguments, choices in cases]


def same(mine, theirs):
    """Bitwise, tensor by tensor."""
    assert mine.keys() == theirs.keys()
    differing = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not differing, f"{differing} differ"


def check_same(on_ranks, expected):
    """Check that ranks have computed together, bitwise, what one device has; `on_ranks` holds an outcome a rank."""
    losses, model, state, reads = expected
    assert torch.isfinite(torch.tensor(losses)).all()
    assert on_ranks[0][0] == losses
    for _, theirs, *_ in on_ranks:
        same(theirs, model)
    same(on_ranks[0][2], state)
    assert sum(each[3] for each in on_ranks) == reads
