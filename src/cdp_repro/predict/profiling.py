"""Costs of stages: bytes and floating-point operations from fake tensors, seconds from real runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cdp_repro.engine.compute import Network
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.engine.messages import layouts_of
from cdp_repro.engine.prefix import Prefix
from cdp_repro.engine.rehearsal import Rehearsal, fake_tensors
from cdp_repro.predict.costs import StageCosts
from cdp_repro.schedule.values import Kind


def profile_stages(
    network: Network, inputs: Tensor, targets: Tensor, *, execute: bool = False, slices: int = 1
) -> StageCosts:
    """Return the costs of each stage on one micro-batch like (inputs, targets), which are [B/M, ...].

    With `slices` they are the first of that many slices of sequences, [samples, tokens, ...].

    Bytes are counted by the engine's own meter, FLOPs by torch's FlopCounterMode. By default nothing is computed:
    the stages see fake tensors, so that a network of any size is profiled in seconds. With `execute` they run on
    the tensors given. The network is left as it is.
    """
    stages = network.stages
    forward, backward, prefix_bytes = profile_passes(network, inputs, targets, execute=execute, slices=slices)
    with _executing() if execute else fake_tensors() as convert:
        output_kept, input_kept = _kept(Rehearsal(network, convert), convert(inputs), convert(targets))
    layouts = layouts_of(network, inputs, targets)
    return StageCosts(
        forward_bytes=tuple(grown for grown, _ in forward),
        backward_bytes=tuple(-grown for grown, _ in backward),
        parameter_bytes=tuple(sum(p.nbytes for p in stage.parameters()) for stage in stages),
        forward_flops=tuple(flops for _, flops in forward),
        backward_flops=tuple(flops for _, flops in backward),
        output_bytes=tuple(layout[Kind.INPUT].nbytes for layout in layouts),
        output_kept=output_kept,
        input_kept=input_kept,
        gradient_bytes=tuple(layout[Kind.GRADIENTS].nbytes for layout in layouts),
        input_gradient_bytes=(0, *(layout[Kind.OUTPUT_GRADIENT].nbytes for layout in layouts[:-1])),
        buffer_bytes=tuple(layout[Kind.BUFFERS].nbytes for layout in layouts),
        prefix_bytes=prefix_bytes,
    )


_Measured = list[tuple[int, int]]
"""By stage: change in live bytes, and FLOPs."""


def profile_passes(
    network: Network, inputs: Tensor, targets: Tensor, *, execute: bool = False, slices: int = 1
) -> tuple[_Measured, _Measured, tuple[int, ...]]:
    """Return, by stage, the change in live bytes and the FLOPs of its forward and of its backward; and `prefix_bytes`.

    `inputs` and `targets` are a micro-batch, [B/M, ...] each. This is the first part of the measurements of
    `profile_stages`, from the same arguments.

    Only the first two slices are run. The prefix grows by the same number of tokens with each slice, so bytes and FLOPs
    grow linearly: those of the middle slice are the mean of all.
    """
    none, meter = [None] * len(network.stages), ActivationMeter()
    with _executing() if execute else fake_tensors() as convert:
        batch = convert(inputs), convert(targets)
        first = Rehearsal(network, convert)
        prefixes: list[Prefix | None] = [Prefix() if slices > 1 else None for _ in network.stages]
        forward = _forwards(first, batch, meter, prefixes)
        if slices == 1:
            return forward, _backwards(first, meter, none), (0,) * len(none)
        second, known = Rehearsal(network, convert), [prefix.take_after() for prefix in prefixes if prefix is not None]
        prefixes.clear()  # they hold the graph, which must live only until the backwards release it
        more = _forwards(second, batch, meter, known)
        later = _backwards(second, meter, none)
        gradients = [prefix.take_gradients() for prefix in known]
        known.clear()
        backward = _backwards(first, meter, gradients)
    grown = tuple(b[0] - a[0] for a, b in zip(forward, more, strict=True))
    return _mean(forward, more, slices), _mean(backward, later, slices), grown


def _mean(first: _Measured, second: _Measured, slices: int) -> _Measured:
    """Return the bytes of the first slice, and the mean FLOPs of all."""
    return [(a[0], a[1] + (b[1] - a[1]) * (slices - 1) // 2) for a, b in zip(first, second, strict=True)]


def _forwards(
    rehearsal: Rehearsal, batch: tuple[Tensor, Tensor], meter: ActivationMeter, prefixes: Sequence[Prefix | None]
) -> _Measured:
    rehearsal.begin(*(each.clone() for each in batch))
    found = []
    for number, prefix in enumerate(prefixes):
        try:
            found.append(_measured(partial(rehearsal.forward, number, meter, prefix), meter))
        except (RuntimeError, TypeError) as error:
            part = f"part {number} of {len(prefixes)} ({type(rehearsal.stages[number]).__name__})"
            raise ValueError(f"{part} cannot be run: {str(error).splitlines()[0]}") from error
    return found


def _backwards(rehearsal: Rehearsal, meter: ActivationMeter, later: Sequence[Mapping[str, Tensor] | None]) -> _Measured:
    """Run all stages backward; `later` are the gradients of what their layers have kept for the next slice."""
    return [_measured(partial(rehearsal.backward, each), meter) for each in reversed(later)][::-1]


@contextmanager
def _executing() -> Iterator[Callable[[Tensor], Tensor]]:
    with torch.random.fork_rng():
        yield torch.clone


def _kept(rehearsal: Rehearsal, inputs: Tensor, targets: Tensor) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return, for each stage run separately, whether its output stays alive for its backward.

    Also return, for each input `x_j`, whether it stays alive for the backward of the stage that reads it; `x_0` is the
    data.
    """
    sources = rehearsal.sources
    outputs, kept = [], [False] * len(sources)
    rehearsal.begin(inputs, targets)
    del inputs
    for stage, read in enumerate(sources):
        meter = ActivationMeter()
        for source in read:
            meter.hold(rehearsal.outputs[source])
        rehearsal.forward(stage, meter)
        with_output = meter.live_bytes
        if stage < len(sources) - 1:
            made = rehearsal.outputs.pop(stage)
            rehearsal.outputs[stage] = made.detach().clone().requires_grad_(made.requires_grad)
            del made
        outputs.append(meter.live_bytes == with_output)
        numbers = [source + 1 for source in read] or [0] * (stage == 0)  # the data of other branches is not asked for
        for number, is_alive in zip(numbers, rehearsal.keeps_inputs(), strict=False):
            kept[number] = is_alive
    return tuple(outputs), tuple(kept)


def _measured(run: Callable[[], object], meter: ActivationMeter) -> tuple[int, int]:
    """Return by how many live bytes `run` changed the meter, and its FLOPs."""
    before = meter.live_bytes
    with FlopCounterMode(display=False) as counter:
        run()
    return meter.live_bytes - before, counter.get_total_flops()


def time_stages(network: Network, inputs: Tensor, targets: Tensor, rounds: int = 5) -> list[float]:
    """Return, for each stage, the median seconds of its forward plus those of its backward on one micro-batch.

    `inputs` and `targets` are [B/M, ...]. The stages are run. One warm-up round is not counted. The network is left
    as it is.
    """
    forward, backward = time_passes(network, inputs, targets, rounds)
    return [sum(both) for both in zip(forward, backward, strict=True)]


def time_passes(network: Network, inputs: Tensor, targets: Tensor, rounds: int = 5) -> tuple[list[float], list[float]]:
    """Return the median seconds of the forward of each stage, and of the backward, as `time_stages` does."""
    forward: list[list[float]] = [[] for _ in network.stages]
    backward: list[list[float]] = [[] for _ in network.stages]
    rehearsal = Rehearsal(network)
    with torch.random.fork_rng():
        for _ in range(rounds + 1):
            rehearsal.begin(inputs.clone(), targets.clone())
            for stage, samples in enumerate(forward):
                samples.append(_timed(lambda stage=stage: rehearsal.forward(stage), inputs.device))  # type: ignore[misc]
            for samples in reversed(backward):
                samples.append(_timed(rehearsal.backward, inputs.device))
    return tuple([statistics.median(samples[1:]) for samples in each] for each in (forward, backward))  # type: ignore[return-value]


def _timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
