"""What each stage costs: bytes and floating-point operations without running, seconds by running."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from cdp_repro.engine.compute import LossFn, SavedForward, StageCompute, Version, backward
from cdp_repro.engine.memory import ActivationMeter
from cdp_repro.schedule import StageCosts

Autocast = Callable[[], AbstractContextManager[object]]


class _MicroBatch:
    """One micro-batch on its way through the stages, forward and then backward."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        autocast: Autocast,
        convert: Callable[[Tensor], Tensor],
    ) -> None:
        last = len(stages) - 1
        self._compute = [
            StageCompute(stage, loss_fn if number == last else None, autocast) for number, stage in enumerate(stages)
        ]
        self._versions = [Version(0, _converted(dict(stage.named_parameters()), convert)) for stage in stages]
        self._buffers = [_converted(dict(stage.named_buffers()), convert) for stage in stages]
        self._saved: list[SavedForward] = []
        self._gradient: Tensor | None = None

    def begin(self, inputs: Tensor, targets: Tensor) -> None:
        self._output, self._targets = inputs, targets

    def forward(self, stage: int, meter: ActivationMeter | None = None) -> None:
        output, saved = self._compute[stage].forward(
            self._versions[stage], self._buffers[stage], self._output, self._targets, meter
        )
        self._saved.append(saved)
        if stage == len(self._compute) - 1:
            self._gradient = torch.ones_like(output)
            del self._output, self._targets
        else:
            self._output = output.requires_grad_(saved.edge is not None)

    def backward(self) -> None:
        self._gradient, _ = backward(self._saved.pop(), self._gradient)


def _converted(tensors: Mapping[str, Tensor], convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: convert(tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}


def profile_stages(
    stages: Sequence[nn.Module],
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    autocast: Autocast = nullcontext,
    execute: bool = False,
) -> StageCosts:
    """Return the costs of each stage on one micro-batch like (inputs, targets), which are [B/N, ...].

    Bytes are counted by the engine's own meter, FLOPs by torch's FlopCounterMode. By default nothing is computed:
    the stages see fake tensors, which have a shape, a type and a storage but no data, so that a network of any
    size is profiled in seconds. With `execute` they run on the tensors given. `stages` are left as they are.
    """
    mode = None if execute else FakeTensorMode(allow_non_fake_inputs=True)
    convert = torch.clone if mode is None else mode.from_tensor
    with mode or nullcontext(), torch.random.fork_rng(devices=[]):
        micro_batch = _MicroBatch(stages, loss_fn, autocast, convert)
        meter = ActivationMeter()
        micro_batch.begin(convert(inputs), convert(targets))
        forward = [_measured(lambda n=n: micro_batch.forward(n, meter), meter) for n in range(len(stages))]  # type: ignore[misc]
        backward = [_measured(micro_batch.backward, meter) for _ in stages][::-1]
    return StageCosts(
        forward_bytes=tuple(grown for grown, _ in forward),
        backward_bytes=tuple(-grown for grown, _ in backward),
        parameter_bytes=tuple(sum(p.nbytes for p in stage.parameters()) for stage in stages),
        forward_flops=tuple(flops for _, flops in forward),
        backward_flops=tuple(flops for _, flops in backward),
    )


def _measured(run: Callable[[], None], meter: ActivationMeter) -> tuple[int, int]:
    """Return by how many live bytes `run` changed the meter, and its FLOPs."""
    before = meter.live_bytes
    with FlopCounterMode(display=False) as counter:
        run()
    return meter.live_bytes - before, counter.get_total_flops()


def time_stages(
    stages: Sequence[nn.Module],
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    autocast: Autocast = nullcontext,
    rounds: int = 5,
) -> list[float]:
    """Return the median seconds of forward plus backward of each stage on one micro-batch, by running it.

    One round of warming up is not counted. `stages` are left as they are.
    """
    seconds: list[list[float]] = [[] for _ in stages]
    micro_batch = _MicroBatch(stages, loss_fn, autocast, torch.clone)
    with torch.random.fork_rng():
        for _ in range(rounds + 1):
            micro_batch.begin(inputs.clone(), targets.clone())
            for stage, samples in enumerate(seconds):
                samples.append(_timed(lambda stage=stage: micro_batch.forward(stage), inputs.device))  # type: ignore[misc]
            for samples in reversed(seconds):
                samples[-1] += _timed(micro_batch.backward, inputs.device)
    return [statistics.median(samples[1:]) for samples in seconds]


def _timed(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
