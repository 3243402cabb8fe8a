"""Outputs of a model outside training: of the whole model on each rank, or stage by stage on their holders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from cdp_repro.engine.compute import Autocast, Network
from cdp_repro.engine.transfers import Outgoing
from cdp_repro.launch import control_messages
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Schedule
from cdp_repro.schedule.forward_only import order, path

TestBatches = Callable[[Iterable[int]], Iterable[tuple[Tensor, Tensor]]]
"""Numbers of batches -> (inputs [B, ...], targets [B, ...]) of each, in the order of the numbers."""

_MOST_ON_THEIR_WAY = 2
"""Batches that a rank may have sent and the next one has not taken; more would only use memory."""


def outputs_of(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], autocast: Autocast
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the output of a whole model on each batch, [B, ...], with the batch's targets, [B, ...]."""
    model.eval()
    for inputs, targets in batches:
        yield _forward(model, inputs, autocast), targets


def pipelined_outputs(
    schedule: Schedule, network: Network, team: Team, batches: TestBatches, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (output [B, ...], targets [B, ...]) of batches whose last stage is here; exhaust it on every rank.

    The stages of this rank stand between those of the ranks before and after it. A batch is read on the rank of its
    first hop, and its targets travel with it. A rank begins a batch when the rank before has sent it; meanwhile that
    rank continues with the next batch. No parameter is sent. Batches go from CPU to CPU: on NCCL, single messages of
    ranks that send to each other would wait for each other.
    """
    outgoing, tasks = Outgoing(), order(schedule, team.rank, count)
    own = iter(batches([batch for batch, place in tasks if place == 0]))
    for number, (batch, place) in enumerate(tasks):
        hops = path(schedule, batch)
        values, targets = next(own) if place == 0 else control_messages.receive(hops[place - 1].rank, team.control)
        values, targets = values.to(team.device), targets.to(team.device)
        for stage in hops[place].stages:
            values = _forward(network.stages[stage], values, network.autocast)
        if place + 1 < len(hops):
            outgoing.let_go(before=number - _MOST_ON_THEIR_WAY)
            for part in control_messages.parts((values, targets)):
                outgoing.send(part, hops[place + 1].rank, number, team.control, control_messages.TAG)
        else:
            yield values, targets
    outgoing.flush()


def _forward(module: nn.Module, inputs: Tensor, autocast: Autocast) -> Tensor:
    with torch.no_grad(), autocast():
        outputs: Tensor = module(inputs)
    return outputs
