"""Settings that exclude each other, and runs that are too large."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from cdp_repro.config.ranges import LARGEST_RATE, LARGEST_SECONDS
from cdp_repro.config.schema import ModelConfig, RunConfig
from cdp_repro.config.task import FIXED_SHAPES
from cdp_repro.schedule import Program, last_steps, norms
from cdp_repro.schedule.schedule_spec import fault_in
from cdp_repro.schedule.sizes import check_divisible

_LARGEST_PROGRAM = 2_000_000
"""Forwards and backwards; a program with this many takes about a minute to make and check."""

_LARGEST_INPUT = 2**31
"""Values in a mini-batch; in fp32, this many take 8 GiB."""


def inconsistent_in_schedule(config: RunConfig) -> Iterable[str]:
    """Yield a sentence for settings that do not fit together, if some of them are in `SCHEDULE_KEYS`.

    Every setting in `SCHEDULE_KEYS` must be in range, because the schedule is made from them. A problem that makes the
    later checks impossible or slow is reported alone.
    """
    if alone := _wrong_alone(config):
        yield from alone
        return
    if too_large := _too_large_input(config):
        yield too_large
    if not config.has_own_clocks:  # else it is among what stands alone
        yield from _wrong_with_schedule(config)
    yield from fault_in(lambda: _check_batch_size(config))
    yield from _wrong_with_updates(config)
    yield from _wrong_with_slices(config)
    if config.baseline is not None:
        yield from _wrong_with_baseline(config)
    if config.price:
        yield from _wrong_with_cluster(config)


def wrong_with_sizes(config: RunConfig) -> list[str]:
    """Return a sentence for each reason why the sizes of a run do not fit together."""
    found = _wrong_alone(config)
    found = found or [*_wrong_with_schedule(config), *fault_in(lambda: _check_batch_size(config))]
    return [*found, *_wrong_with_baseline(config)] if config.baseline is not None else found


def _wrong_alone(config: RunConfig) -> list[str]:
    """Return what makes all later checks impossible or slow."""
    if config.has_own_clocks and (found := _wrong_with_schedule(config)):  # it gives the micro-batches of a step
        return found
    return [too_large] if (too_large := _too_large_program(config)) else []


def inconsistent_elsewhere(config: RunConfig) -> Iterable[str]:
    """Yield a sentence for other settings that do not fit together; settings may be out of range."""
    yield from _wrong_with_dataset(config)
    yield from _wrong_with_optimizer(config)
    yield from _wrong_with_delay(config)
    yield from _wrong_with_text(config)


def _too_large_input(config: RunConfig) -> str | None:
    """Return a sentence if a mini-batch has too many values for memory."""
    values = config.batch_size * math.prod(config.input_shape)
    if values <= _LARGEST_INPUT:
        return None
    shape = "x".join(map(str, config.input_shape))
    return (
        f"batch_size={config.batch_size} samples of {shape} are {values:,} values, more than {_LARGEST_INPUT:,}: use "
        "a smaller batch_size or dataset.image_size, e.g. batch_size=64 dataset.image_size=224"
    )


def _too_large_program(config: RunConfig) -> str | None:
    """Return a sentence if making the program would take minutes or more; estimated without making it."""
    matrix = config.mode.staleness
    longest = config.workers - 1 if config.updates_each else 1
    if matrix is not None:
        longest = max((max(row, default=0) for row in matrix), default=0)
    forwards = config.step_micro_batches * config.stage_count
    # steps until the pattern repeats; where each micro-batch is a step, the pipeline has both to fill and to empty
    steps = 3 * longest + 2 if config.updates_each else longest + 2
    if 2 * forwards * steps <= _LARGEST_PROGRAM:
        return None
    given = _factors_of_program(config)
    said = (
        f"{', '.join(f'{name}={value}' for name, value in given.items())} and a staleness of up to {longest} need a "
        f"program of {2 * forwards * steps:,} forwards and backwards, more than {_LARGEST_PROGRAM:,}"
    )
    if matrix is not None and 6 * forwards <= _LARGEST_PROGRAM:
        return f"{said}: use a staleness of at most {_LARGEST_PROGRAM // (2 * forwards) - 2}"
    return (
        f"{said}: use numbers whose product is at most {_LARGEST_PROGRAM // 6:,}, e.g. "
        f"{' '.join(f'{name}={_SMALL[name]}' for name in given)}"
    )


_SMALL = {"micro_batches": 4, "workers": 4, "accumulate": 1, "replicas": 1, "slices": 2, "stages": 4}
"""Values with which a program is small, of all numbers that `_factors_of_program` may name."""


def _factors_of_program(config: RunConfig) -> dict[str, int]:
    """Return the numbers, by key, whose product is that of the forwards in a training step."""
    if config.micro_batches:
        turns = {"micro_batches": config.micro_batches}
    else:
        turns = {"workers": config.workers, "accumulate": config.accumulate}
    slices = config.slices_of_a_sequence
    cut = {"slices": slices} if slices > 1 else {}
    return {**turns, "replicas": config.replicas, **cut, "stages": config.stage_count}


def _check_batch_size(config: RunConfig) -> None:
    if config.has_own_clocks and config.batch_size % config.step_micro_batches:
        pushes = config.step_micro_batches
        lower, each = config.batch_size // pushes, config.batch_size // config.workers
        choices = " or ".join(f"batch_size={n * pushes}" for n in (lower, lower + 1) if n)
        like = f"; {each * pushes} gives each as many samples as mode=dp with {config.batch_size}" if each else ""
        raise ValueError(
            f"batch_size={config.batch_size} is not divisible by the {pushes} pushes that workers of these speeds make "
            f"in a training step: use {choices}{like}"
        )
    if config.has_own_clocks:
        return
    if config.updates_each:
        check_divisible(config.batch_size, replicas=config.replicas)
    elif config.micro_batches:
        check_divisible(config.batch_size, micro_batches=config.micro_batches, replicas=config.replicas)
    else:
        check_divisible(
            config.batch_size, workers=config.workers, accumulate=config.accumulate, replicas=config.replicas
        )


def _wrong_with_schedule(config: RunConfig) -> list[str]:
    """Return a sentence for each reason why the schedule cannot be made, or cannot serve the staleness matrix."""
    try:
        found = config.spec().faults()
    except ValueError as error:  # the branches of the model cannot have this number of stages
        return [str(error), *replace(config, model=ModelConfig()).spec().faults()]
    if config.mode.staleness is None:  # a timeline can always serve the rule of a named mode
        return found
    return found or fault_in(lambda: Program(config.schedule()))


def _wrong_with_cluster(config: RunConfig) -> Iterable[str]:
    cluster, stages = config.cluster, config.stage_count
    ways = [cluster.calibrate, cluster.flops_per_second is not None, cluster.forward_seconds is not None]
    if sum(ways) != 1:
        yield (
            f"price=true takes the seconds of stages from one source, not {sum(ways)}: give cluster.calibrate=true, "
            f"cluster.flops_per_second=1e13 or cluster.forward_seconds={[0.01] * stages}"
        )
    if cluster.calibrate and (slices := config.slices_of_a_sequence) > 1:
        yield (
            f"cluster.calibrate=true times sequences without those before, not slices={slices}, which look back: give "
            f"cluster.flops_per_second=1e13 or cluster.forward_seconds={[0.01] * stages}"
        )
    if cluster.backward_seconds is not None and cluster.forward_seconds is None:
        yield "cluster.backward_seconds has no effect without cluster.forward_seconds: give both"
    for name in ("forward_seconds", "backward_seconds", "update_seconds"):
        seconds = getattr(cluster, name)
        if seconds is not None and (len(seconds) != stages or not all(0 <= s <= LARGEST_SECONDS for s in seconds)):
            yield (
                f"cluster.{name}={seconds}: must be {stages} finite numbers, from 0 to {LARGEST_SECONDS:g}, "
                f"one a stage, e.g. {[0.01] * stages}"
            )


def _wrong_with_dataset(config: RunConfig) -> Iterable[str]:
    for name, fixed in FIXED_SHAPES.get(config.dataset.name, {}).items():
        if (value := getattr(config.dataset, name)) != fixed:
            yield f"dataset.{name}={value}, but that of {config.dataset.name} is {fixed}: use dataset.{name}={fixed}"


def _wrong_with_optimizer(config: RunConfig) -> Iterable[str]:
    optim = config.optim
    if optim.nesterov and not optim.momentum:
        yield "optim.nesterov=true needs momentum, not optim.momentum=0: use optim.momentum=0.9"
    if optim.name == "muon" and config.baseline is not None:
        yield (
            f"optim=muon needs whole matrices, and is tried with our engine only, not with baseline={config.baseline}: "
            "use optim=adamw"
        )
    yield from _too_large_in_the_end(config)
    if optim.clip_norm is not None and config.baseline is not None:
        yield f"baseline={config.baseline} knows no optim.clip_norm={optim.clip_norm}: use optim.clip_norm=null"


def _wrong_with_updates(config: RunConfig) -> Iterable[str]:
    """Yield a sentence for each part of an update that the schedule cannot serve."""
    is_asked = config.optim.clip_norm is not None or config.optim.name == "muon" or config.delay.name != "none"
    if config.baseline is not None or not is_asked:
        return
    with suppress(ValueError):  # no schedule: `_wrong_with_schedule` reports it
        schedule = config.schedule()
        if config.optim.clip_norm is not None and not norms.can_clip(Program(schedule)):
            yield f"optim.{norms.refusal(schedule)}"
        if config.optim.name == "muon" and schedule.placement.is_sharded:
            yield (
                f"optim=muon needs whole matrices, but {schedule} holds shards of them by collectives: use "
                "collectives=false, or optim=adamw"
            )
        if config.delay.name != "none" and (why := last_steps.refusal(schedule, config.delay.name)):
            yield why


def _too_large_in_the_end(config: RunConfig) -> Iterable[str]:
    """Yield a sentence if a schedule in steps leads to a learning rate beyond fp32, where an optimizer would fail."""
    optim, steps = config.optim, (config.epochs - 1) // max(1, config.optim.step_epochs)
    if optim.schedule == "step" and steps > 0 and optim.lr <= LARGEST_RATE and optim.gamma < math.inf:
        largest = (LARGEST_RATE / max(1.0, optim.lr)) ** (1 / steps)
        if optim.gamma > largest:
            yield (
                f"optim.gamma={optim.gamma} multiplies optim.lr={optim.lr} {steps} times in epochs={config.epochs}, "
                f"beyond {LARGEST_RATE:g}, where fp32 ends: use at most optim.gamma={0.99 * largest:.3g}"
            )


def _wrong_with_delay(config: RunConfig) -> Iterable[str]:
    delay = config.delay
    if delay.name == "none":
        return
    if config.baseline is not None:
        yield f"baseline={config.baseline} reads nothing late for delay={delay.name} to make up for: use delay=none"
    decay = "momentum" if config.optim.name in ("sgd", "muon") else "beta1"
    if delay.name == "prediction" and not getattr(config.optim, decay):
        yield (
            f"delay=prediction expects the next step to be like the last, as momentum makes it, but optim.{decay}=0: "
            f"use optim.{decay}=0.9, or delay=error_feedback"
        )


def _wrong_with_text(config: RunConfig) -> Iterable[str]:
    if config.task.is_text and config.model.name != "gpt":
        yield f"dataset=text has tokens, which model={config.model.name} cannot read: use model=gpt"
    if config.model.name == "gpt" and not config.task.is_text:
        yield f"model=gpt reads tokens, not the images of dataset={config.dataset.name}: use dataset=text"
    model = config.model
    if model.name == "gpt" and model.heads > 0 and model.width % model.heads:
        works = max(1, round(model.width / model.heads)) * model.heads
        yield f"model.width={model.width} is not divisible by model.heads={model.heads}: use model.width={works}"


def _wrong_with_slices(config: RunConfig) -> Iterable[str]:
    model, slices = config.model, config.slices_of_a_sequence
    if slices > 1 and not config.task.is_text:
        yield (
            f"mode={config.mode.name} cuts sequences along their tokens, which dataset={config.dataset.name} has not: "
            "use dataset=text model=gpt"
        )
    elif slices > 1 and model.context % slices:
        works = _divisor(model.context, slices)
        yield f"model.context={model.context} is not divisible by slices={slices}: use slices={works}"


def _divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`; 1 only if there is no other."""
    divisors = [each for each in range(2, number + 1) if number % each == 0] or [1]
    return min(divisors, key=lambda each: abs(each - wanted))


def _wrong_with_baseline(config: RunConfig) -> Iterable[str]:
    if config.workers < 2:
        yield f"baseline={config.baseline} is for several processes, not for workers={config.workers}: use workers=2"
    if config.mode.name != "dp":
        yield f"baseline={config.baseline} trains by data parallelism, not by mode={config.mode.name}: use mode=dp"
    if config.placement.name != "single_device":
        yield f"baseline={config.baseline} places its stages itself: drop placement={config.placement.name}"
    if config.branches:
        yield f"baseline={config.baseline} runs a chain, which model={config.model.name} is not: use model=resnet8"
    if config.collectives:
        yield f"baseline={config.baseline} uses the library's collectives in any case: drop collectives=true"
    for name, neutral in (("replicas", 1), ("accumulate", 1), ("micro_batches", None)):
        if (value := getattr(config, name)) != neutral:
            instead = f"workers={config.step_micro_batches} {name}={neutral or 'null'}"
            yield f"baseline={config.baseline} knows no {name}={value}: use {instead}"
    for name in ("speeds", "program", "slot_order", "pipeline_schedule"):
        if (given := getattr(config, name)) != getattr(RunConfig, name):
            yield f"baseline={config.baseline} runs the library's own loop, without {name}={given}: leave {name} out"
    if config.baseline in ("torch_gpipe", "torch_1f1b") and config.stage_count != config.workers:
        yield (
            f"baseline={config.baseline} runs one stage a process, not stages={config.stage_count} on "
            f"workers={config.workers}: use stages={config.workers}"
        )
