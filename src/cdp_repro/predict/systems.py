"""Every system of the field on the same model, micro-batches and ranks: what `cdp-plan --systems` shows.

Numbers are for a mini-batch of M micro-batches in the steady state. Systems that update after each micro-batch make M
updates with it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cdp_repro.config import ConfigError, RunConfig
from cdp_repro.config.errors import refuse
from cdp_repro.config.schema import ModeConfig
from cdp_repro.observe.atomic_file import replacing
from cdp_repro.observe.text import format_bytes, table
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing import Cluster, price
from cdp_repro.predict.pricing.quote import cluster_of
from cdp_repro.predict.remembered_cuts import stage_cut
from cdp_repro.predict.simulate import simulate_totals
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.predict.system_specs import CHUNKS, ON_OTHER_RANKS, SYSTEMS, CommonSizes, is_compared
from cdp_repro.predict.training_state import optimizer_states
from cdp_repro.schedule import Program, Schedule, Slot, Spec
from cdp_repro.schedule.schedule_spec import fault_in
from cdp_repro.schedule.sizes import check_divisible


@dataclass(frozen=True)
class System:
    """The cost of a mini-batch on one system."""

    mode: str
    placement: str
    stages: int
    ranks: int
    idle_share: float
    """Share, 0 to 1, of the slots of all ranks in which a rank computes nothing; each part of a backward has a slot."""
    activation_bytes: int
    """Peak on the rank with most."""
    parameter_bytes: int
    """Peak on the rank with most, including all versions."""
    gradient_bytes: int
    """Peak of sums of gradients on the rank with most."""
    bytes_together: int
    """Peak of all these, of lent parameters and of optimizer state on the rank with most."""
    versions: int
    """Largest number of versions of one stage on one rank."""
    messages: float
    """Messages of all ranks for a mini-batch."""
    bytes_sent: float
    """Bytes that a rank sends on average for a mini-batch."""
    mean_staleness: float
    """Updates of its stage that a forward misses, on average over micro-batches and stages."""
    largest_staleness: int
    seconds: float | None
    """Seconds of a mini-batch on the cluster of the configuration; None without price, or if it has other stages."""
    slots: Sequence[Slot]
    """The first two mini-batches."""


def compare_systems(config: RunConfig) -> list[System]:
    """Simulate the model of `config` on every system that can have its sizes.

    Raises:
        ConfigError: sizes that do not fit together, with values that work.
    """
    clusters: dict[tuple[int, int], Cluster | None] = {}  # by stages and slices: to measure one takes seconds
    found = []
    for schedule, cut in systems_of(config):
        size = schedule.stages, schedule.sizes.slices
        if size not in clusters:
            clusters[size] = _cluster(schedule, cut, config)
        found.append(_system(schedule, cut, config, clusters[size]))
    return found


_OF_ONE_SYSTEM = (
    "stages", "servers", "slices", "slack", "jitter", "message_time", "collectives", "pipeline_schedule",
)  # fmt: skip
"""Keys that some of the compared systems do not have, or have with other values."""


def refuse_sizes_of_one_system(config: RunConfig) -> None:
    """Raise ConfigError for settings that a comparison of all systems would not use."""
    given = {name: value for name in _OF_ONE_SYSTEM if (value := getattr(config, name)) != getattr(RunConfig, name)}
    if config.stages == (config.ranks or config.workers):  # what the systems have in any case
        given.pop("stages", None)
    refuse(f"--systems gives each system {name} of its own: leave {name}={value} out" for name, value in given.items())


def systems_of(config: RunConfig) -> Iterator[tuple[Schedule, StageCut]]:
    """Yield every system that can have the sizes of `config`, with its model cut for it; also its own mode.

    Each runs the M = `workers` x `accumulate` micro-batches of a mini-batch on D ranks: `ranks`, or else `workers`.

    Raises:
        ConfigError: sizes that do not fit together, with values that work.
    """
    common, whole = _common_sizes(config)
    usual = stage_cut(whole)
    for spec in common.specs():
        if spec.stages <= sum(usual.blocks_per_stage):
            is_usual = spec.stages == whole.stage_count and spec.sizes.slices == 1
            cut = usual if is_usual else stage_cut(_config_of(spec, whole))
            yield Schedule.from_spec(spec, cut.costs.gradient_bytes), cut


def left_out(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each system or placement that `systems_of` leaves out."""
    common, whole = _common_sizes(config)
    blocks = sum(stage_cut(whole).blocks_per_stage)
    for mode, placement in SYSTEMS:
        try:
            stages = common.spec(mode, placement).stages
        except ValueError as error:
            yield f"{mode} is left out: {error}"
        else:
            if stages > blocks:
                yield f"{mode} is left out: {config.model.name} has {blocks} blocks for its {stages} stages"
    yield from (f"mode={config.mode.name} is left out: {fault}" for fault in fault_in(common.own_spec))
    for placement, modes in ON_OTHER_RANKS.items():
        counts = [f"{Schedule.from_spec(common.spec(mode, placement)).ranks} in {mode}" for mode in modes]
        yield f"{placement} is left out: the ranks of {common.ranks} workers are {', '.join(counts)}"


def _common_sizes(config: RunConfig) -> tuple[CommonSizes, RunConfig]:
    """Return the sizes that all systems share, and the data-parallel run with these sizes."""
    ranks, micro_batches = config.ranks or config.workers, config.workers * config.accumulate
    if config.replicas > 1:
        raise ConfigError(
            [f"--systems compares single copies of a model, not replicas={config.replicas}: leave it out"]
        )
    if config.micro_batches:
        raise ConfigError(["--systems takes M as workers x accumulate: leave micro_batches out"])
    if config.speeds:
        raise ConfigError(["--systems compares workers of one speed: leave speeds out"])
    if micro_batches % ranks:
        raise ConfigError(
            [f"{micro_batches} micro-batches (workers x accumulate) are no multiple of ranks={ranks}: use "
             f"accumulate={-(-micro_batches // ranks)} workers={ranks}"]
        )  # fmt: skip
    if config.branches:
        try:
            config.branches(ranks)
        except ValueError as error:
            said = f"--systems cuts the model into a stage for each rank, workers={ranks}: {error}"
            raise ConfigError([said]) from error
    faults = fault_in(lambda: check_divisible(config.batch_size, workers=ranks, accumulate=micro_batches // ranks))
    refuse(f"--systems cuts the mini-batch into workers x accumulate micro-batches: {fault}" for fault in faults)
    whole = replace(
        config,
        mode=ModeConfig("dp"),  # of pipedream, a micro-batch would be a whole mini-batch
        stages=ranks,
        workers=ranks,
        accumulate=micro_batches // ranks,
        ranks=None,
        servers=None,
        speeds=None,
        jitter=None,
        message_time=None,
        slack=None,
        slices=None,
    )
    tokens = config.model.context if config.task.is_text else 0
    own = None if is_compared(config.spec()) else config.spec()
    return CommonSizes(ranks, whole.accumulate, tokens, config.branches, config.slot_order, own), whole


def _config_of(spec: Spec, config: RunConfig) -> RunConfig:
    """Return the configuration of a system, in those values on which its cut and its costs depend."""
    mode = ModeConfig(spec.mode) if isinstance(spec.mode, str) else ModeConfig("matrix", [*map(list, spec.mode)])
    return replace(config, mode=mode, slices=spec.slices, stages=spec.stages)


def explored(config: RunConfig) -> Iterator[tuple[Schedule, StageCosts]]:
    """Yield the schedule of `config`, its data parallelism, and every system that can have its sizes, with costs.

    All have micro-batches of the same samples: of modes whose training step is another number of them, a mini-batch
    differs from that of `config`.
    """
    cut = stage_cut(config)
    chosen = config.schedule(cut.costs.gradient_bytes)
    parallel = stage_cut(config.reading_whole()).costs
    own = {_resolved(chosen): (chosen, cut.costs)}
    baseline = Program(chosen).data_parallel().schedule
    own.setdefault(_resolved(baseline), (baseline, parallel))
    yield from own.values()
    samples = config.batch_size // config.sample_parts
    alike = replace(config, batch_size=samples * config.workers * config.accumulate)
    with suppress(ConfigError):  # the other systems cannot have these sizes
        yield from ((schedule, cut.costs) for schedule, cut in systems_of(alike) if _resolved(schedule) not in own)


def _resolved(schedule: Schedule) -> Spec:
    """Return the choices of a schedule with those that it has made itself."""
    sizes = schedule.sizes
    return replace(schedule.spec, slices=sizes.slices, ranks=sizes.pipeline_ranks)


def simulated_system(
    schedule: Schedule, costs: StageCosts, micro_batches: int, states: Sequence[float] = (), clips: bool = False
) -> System:
    """Return the cost of a mini-batch of `micro_batches` on one system, without seconds.

    `states` and `clips` are the `optimizer_states` and `clips` of `Devices`.
    """
    updates = micro_batches // schedule.sizes.sample_parts
    program = Program(schedule)
    slots = program.until_it_repeats(updates)
    totals = [*simulate_totals(schedule, costs, slots, states, clips)]
    length, first = updates * schedule.slots_per_step, program.steady_step * schedule.slots_per_step
    window = range(first, first + length)
    steady = [total for total in totals if total.slot in window]
    busy = sum(slot in window for _, slot in schedule.timeline.lanes.computing(slots))
    return System(
        schedule.mode,
        schedule.spec.placement,
        schedule.stages,
        schedule.ranks,
        1 - busy / (schedule.ranks * length),
        max(total.activation_bytes_per_device for total in totals),
        max(total.parameter_bytes_per_device for total in totals),
        max(total.gradient_bytes_per_device for total in totals),
        max(total.bytes_per_device for total in totals),
        max(total.versions_kept for total in totals),
        sum(total.messages for total in steady),
        sum(sum(total.bytes_sent.values()) for total in steady) / schedule.ranks,
        schedule.rule.mean,
        max(schedule.rule.largest_by_stage),
        None,
        program.slots(2 * updates),
    )


def _system(schedule: Schedule, cut: StageCut, config: RunConfig, cluster: Cluster | None) -> System:
    micro_batches = config.workers * config.accumulate
    states, clips = optimizer_states(config, cut, schedule), config.optim.clip_norm is not None
    found = simulated_system(schedule, cut.costs, micro_batches, states, clips)
    if cluster is None:
        return found
    step_seconds = price(Program(schedule), cut.costs, cluster).step_seconds
    return replace(found, seconds=micro_batches // schedule.sizes.sample_parts * step_seconds)


def _cluster(schedule: Schedule, cut: StageCut, config: RunConfig) -> Cluster | None:
    """Return the cluster on which a system is priced; None without price, or if the seconds are not of its stages."""
    given = config.cluster
    of_stages = (given.forward_seconds, given.backward_seconds, given.update_seconds)
    are_of_others = any(each is not None and len(each) != schedule.stages for each in of_stages)
    are_whole = given.calibrate and schedule.sizes.slices > 1  # sequences are timed, not slices
    if not config.price or are_of_others or are_whole:
        return None
    return cluster_of(_config_of(schedule.spec, config), cut)


def systems_text(systems: Sequence[System], config: RunConfig) -> str:
    """Return the comparison as a table."""
    columns = [
        "mode", "placement", "idle", "activations", "parameters", "gradients", "together", "versions", "messages",
        "sent", "staleness",
    ]  # fmt: skip
    rows = [tuple(columns + (["seconds"] if config.price else []))]
    for each in systems:
        staleness = f"{each.mean_staleness:.2f}, at most {each.largest_staleness}" if each.largest_staleness else "0"
        row = [
            each.mode, each.placement, f"{each.idle_share:.3f}", format_bytes(each.activation_bytes),
            format_bytes(each.parameter_bytes), format_bytes(each.gradient_bytes), format_bytes(each.bytes_together),
            str(each.versions), f"{each.messages:g}", format_bytes(each.bytes_sent), staleness,
        ]  # fmt: skip
        seconds = ["-" if each.seconds is None else f"{each.seconds:.4g}"]
        rows.append(tuple(row + (seconds if config.price else [])))
    ranks, micro_batches = systems[0].ranks, config.workers * config.accumulate
    notes = (
        f"{config.model.name} on {ranks} ranks that compute, a mini-batch of {micro_batches} micro-batches of "
        f"{config.batch_size // micro_batches} samples\n"
        "idle: share of the slots of all ranks; activations, parameters (all versions), gradients (sums): the rank\n"
        "with most, while steps follow one another; together: at one time, with lent parameters and what\n"
        f"optim={config.optim.name} keeps; messages: of all ranks; sent: by a rank; staleness: updates that a forward\n"
        "misses, mean over all\n"
    )
    if any(each.mode == "interleaved" for each in systems):
        notes += f"interleaved cuts the model into {CHUNKS} stages for each rank, all others into one\n"
    notes += "".join(f"{sentence}\n" for sentence in left_out(config))
    return f"{notes}\n{table(rows)}\n"


def write_systems(systems: Sequence[System], folder: Path) -> list[Path]:
    """Write the table as CSV and all timelines as one picture, SVG and PNG."""
    from cdp_repro.observe.figures import save_figure
    from cdp_repro.observe.rank_figures import rank_timelines

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in ("systems.csv", "systems.svg", "systems.png")]
    names = [name for name in System.__dataclass_fields__ if name != "slots"]
    with replacing(written[0]) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(each, name) for name in names] for each in systems)
    figure = rank_timelines({f"{each.mode}, {each.placement}": each.slots for each in systems}, systems[0].ranks)
    for path in written[1:]:
        save_figure(figure, path)
    return written
