"""The forecast of a run: timelines, stage cuts and memory from the schedule and fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from cdp_repro.config import RunConfig
from cdp_repro.config.program_file import program_of
from cdp_repro.observe.atomic_file import replacing
from cdp_repro.observe.text import format_bytes, table
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.device_memory import DeviceMemory, device_memory, totals_of
from cdp_repro.predict.remembered_cuts import stage_cut
from cdp_repro.predict.simulate import SlotTotals, simulate_slots, simulate_totals, version_bytes
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.schedule import SLOT_ORDERS, Program, Schedule, Slot
from cdp_repro.schedule.grid import text_grid
from cdp_repro.trace import Trace, write_actions_csv, write_comms_csv, write_memory_csv, write_perfetto

SHOWN_WORKERS = 16
"""Up to this many micro-batches in a step, the timeline and the memory of each slot are shown as text."""

STEPS = 2
"""Number of mini-batches that are drawn: the first reads fresh parameters, the second shows the steady state."""


@dataclass(frozen=True)
class Forecast:
    """One mode in one slot order, simulated."""

    program: Program
    costs: StageCosts
    totals: Sequence[SlotTotals]
    """See `totals_of`."""
    memory: DeviceMemory
    """The most that a device needs."""

    @cached_property
    def slots(self) -> Sequence[Slot]:
        """Slots of the first training steps, which are drawn, and of the drain."""
        sizes = self.program.schedule.sizes
        return self.program.slots(STEPS * -(-sizes.lanes // sizes.micro_batches))

    @cached_property
    def trace(self) -> Trace:
        """Trace of the same slots."""
        return simulate_slots(self.program.schedule, self.costs, self.slots)

    @property
    def activation_peak_bytes(self) -> int:
        """Largest sum over ranks of live activation bytes."""
        return _peak(self.totals)

    @property
    def versions_kept(self) -> int:
        """Largest number of parameter versions of one stage that are alive on one rank while steps follow steps."""
        before_drain = self.totals[: (self.program.steady_step + 1) * self.program.schedule.slots_per_step]
        return max(total.versions_kept for total in before_drain)

    @property
    def versions_text(self) -> str:
        """`versions_kept`, and how many there are in a drain, at the end of an epoch or for a checkpoint, if more."""
        most = max(total.versions_kept for total in self.totals)
        return f"{self.versions_kept}" + (f" ({most} in a drain)" if most > self.versions_kept else "")

    @property
    def messages_per_step(self) -> int:
        """Messages of all ranks in a training step, once the timeline repeats itself."""
        length = self.program.schedule.slots_per_step
        begin = self.program.steady_step * length
        return sum(total.messages for total in self.totals[begin : begin + length])


@dataclass(frozen=True)
class Plan:
    """The chosen mode beside data parallelism, for one model cut into stages."""

    config: RunConfig
    cut: StageCut
    forecasts: Mapping[str, Forecast]
    """By label: data parallelism first, then the chosen mode, or the `program` of a file; in the chosen slot order."""
    other_order: Forecast
    """The chosen mode in the other slot order."""

    @property
    def chosen(self) -> Forecast:
        """The chosen mode."""
        return [*self.forecasts.values()][-1]


def make_plan(config: RunConfig) -> Plan:
    """Simulate the run that `config` describes, by the program of its file if it has one.

    Needs no data, and computes nothing unless partition=time.

    Raises:
        ConfigError, ModelError, ScheduleError: as the run itself would.
    """
    cut = stage_cut(config)
    program = program_of(config, cut.costs.gradient_bytes)
    chosen = program.schedule
    label = chosen.mode if config.program is None else "program"
    forecasts: dict[str, Forecast] = {}
    if label != "dp":
        whole = config.reading_whole()
        forecasts["dp"] = _forecast(whole, program.data_parallel(), stage_cut(whole))
    forecasts[label] = _forecast(config, program, cut)
    (other,) = set(SLOT_ORDERS) - {config.slot_order}
    in_other_order = Schedule.from_spec(replace(chosen.spec, slot_order=other), chosen.gradient_bytes)
    return Plan(config, cut, forecasts, _forecast(config, Program(in_other_order), cut))


def _forecast(config: RunConfig, program: Program, cut: StageCut) -> Forecast:
    totals = totals_of(config, cut, program)
    return Forecast(program, cut.costs, totals, device_memory(config, cut, program, totals))


def plan_text(plan: Plan, width: int) -> str:
    """Return the whole plan as text, at most `width` characters wide where possible."""
    config = plan.config
    head = (
        f"{config.model.name}, {config.task.shape_text(config.input_shape)}, mini-batch {config.batch_size} = "
        f"{_parts_of_mini_batch(config)} x {config.micro_batch_shape[0]}, {config.placement.name}"
    )
    parts = [head, _stage_table(plan)]
    if max(forecast.program.schedule.micro_batches for forecast in plan.forecasts.values()) <= SHOWN_WORKERS:
        for name, forecast in plan.forecasts.items():
            lanes = forecast.program.schedule.timeline.lanes
            grid = text_grid(forecast.slots, lanes, width)
            rows = f"; a worker has {lanes.each} lanes" if lanes.each > 1 else ""
            rows += "; a row follows micro-batches through the ranks" if config.placement.name == "pipeline" else ""
            parts.append(f"timeline of {name} (F2v1 = forward of stage 2 with parameter version 1{rows})\n\n{grid}")
        parts.append(_memory_table(plan))
    else:
        parts.append(f"timelines and memory per slot of {config.workers} workers are too large for text: --out=FOLDER")
    return "\n\n".join([*parts, _comparison(plan), _device_table(plan)]) + "\n"


def _parts_of_mini_batch(config: RunConfig) -> str:
    """Return the parts of a mini-batch along its samples, as text."""
    if config.has_own_clocks:
        return f"{config.sample_parts} pushes of {config.workers} workers"
    if config.updates_each:
        parts = "1 micro-batch"
    elif config.micro_batches:
        parts = f"{config.micro_batches} micro-batches"
    else:
        accumulated = f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
        parts = f"{config.workers} workers{accumulated}"
    return parts + (f" x {config.replicas} replicas" if config.replicas > 1 else "")


def _stage_table(plan: Plan) -> str:
    costs = plan.cut.costs
    rows = [("stage", "parameters", "GFLOPs/micro-batch", "activations", "blocks")]
    for stage, names in enumerate(plan.cut.block_names):
        flops = costs.forward_flops[stage] + costs.backward_flops[stage]
        rows.append(
            (
                str(stage),
                format_bytes(costs.parameter_bytes[stage]),
                f"{flops / 1e9:.4g}",
                format_bytes(costs.forward_bytes[stage]),
                names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}",
            )
        )
    title = f"stages, cut by {plan.config.partition} (imbalance {plan.cut.imbalance:.3f} = largest / mean)"
    return f"{title}\n\n{table(rows)}"


def _memory_table(plan: Plan) -> str:
    """Return live activation bytes per slot, with a bar for each mode."""
    curves = {name: forecast.trace.activation_bytes_per_slot for name, forecast in plan.forecasts.items()}
    peak = max(max(curve.values()) for curve in curves.values())
    rows = [("slot", *(text for name in curves for text in (name, "")))]
    for slot in range(1 + max(max(curve) for curve in curves.values())):
        row = [str(slot)]
        for curve in curves.values():
            live = curve.get(slot, 0)
            row += [format_bytes(live), "#" * round(20 * live / peak)]
        rows.append(tuple(row))
    return f"live activations per slot, all devices\n\n{table(rows)}"


def _comparison(plan: Plan) -> str:
    """Return the deciding table: the peak of each forecast, as a share of data parallelism's."""
    baseline = plan.forecasts["dp"].activation_peak_bytes
    rows = [("mode", "slot order", "activation peak", "/ dp", "versions kept", "messages a step")]
    for name, forecast in _compared(plan):
        schedule, peak = forecast.program.schedule, forecast.activation_peak_bytes
        rows.append(
            (
                name,
                schedule.spec.slot_order,
                format_bytes(peak),
                f"{peak / baseline:.3f}",
                forecast.versions_text,
                str(forecast.messages_per_step),
            )
        )
    shown = table(rows)
    programs = [forecast.program for forecast in (plan.forecasts["dp"], plan.chosen)]
    parallel, chosen = (program.schedule for program in programs)
    if parallel.sizes.pipeline_ranks > chosen.sizes.pipeline_ranks:
        shown += f"\ndp is on {parallel.ranks} ranks: on {chosen.ranks}, a rank would hold stages of several branches"
    if parallel.spec.placement != chosen.spec.placement:
        shown += f"\ndp is on {parallel.spec.placement}: it cannot run on placement={chosen.spec.placement}"
    if chosen.sizes.sample_parts != parallel.sizes.sample_parts:
        more = f"a step of dp has {parallel.micro_batches} such micro-batches, one of {chosen.mode} "
        return f"{shown}\n{more}{chosen.micro_batches}"
    if chosen.timeline.name != "cyclic":
        return shown
    return f"{shown}\nequal stages would give {_of_equal_stages(*programs)}"


def _compared(plan: Plan) -> list[tuple[str, Forecast]]:
    """Return what the tables compare: data parallelism, the chosen mode, and the same in the other slot order."""
    return [*plan.forecasts.items(), (plan.other_order.program.schedule.mode, plan.other_order)]


def _of_equal_stages(parallel: Program, chosen: Program) -> str:
    """Return the ratio of activation peaks if all stages were equal: the closed form where it holds, else simulated."""
    schedule, n = chosen.schedule, chosen.schedule.sizes.workers
    if schedule.stages == n and schedule.spec.placement != "pipeline":
        return f"(N+1)/2N = {(n + 1) / (2 * n):.3f} in paper order"
    equal = StageCosts.equal(schedule.stages)
    own, theirs = (_peak(simulate_totals(each.schedule, equal, each.complete_run)) for each in (chosen, parallel))
    return f"{own / theirs:.3f} in slot order {schedule.spec.slot_order}"


def _peak(totals: Iterable[SlotTotals]) -> int:
    return max(total.activation_bytes for total in totals)


def _device_table(plan: Plan) -> str:
    """Return what a device needs memory for, on the device with most of each."""
    optim, delay = plan.config.optim.name, plan.config.delay.name
    columns = {"activations": "activations", "parameters": "parameters", "gradients": "gradients"}
    columns["optimizer"] = f"optim={optim}"
    columns |= {} if delay == "none" else {"delay": f"delay={delay}", "copies": "copies for stale reads"}
    columns["together"] = "together"
    rows = [("mode", "slot order", *columns.values())]
    for name, forecast in _compared(plan):
        sizes = (format_bytes(getattr(forecast.memory, column)) for column in columns)
        rows.append((name, forecast.program.schedule.spec.slot_order, *sizes))
    return f"a device needs at most (not counted: mini-batches, messages on their way)\n\n{table(rows)}"


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Write timelines and memory as SVG and PNG, and actions, memory, messages and trace of each mode as files."""
    from cdp_repro.observe.figures import memory_figure, save_figure, timeline_figure

    folder.mkdir(parents=True, exist_ok=True)
    config = plan.config
    timelines = {name: forecast.slots for name, forecast in plan.forecasts.items()}
    lanes = {name: forecast.program.schedule.timeline.lanes for name, forecast in plan.forecasts.items()}
    curves = {name: forecast.trace.activation_bytes_per_slot for name, forecast in plan.forecasts.items()}
    figures = {
        "timeline": timeline_figure(timelines, lanes, config.stage_count),
        "memory": memory_figure(curves, f"{config.model.name}, {config.workers} workers, cut by {config.partition}"),
    }
    written = [folder / f"{name}.{suffix}" for name in figures for suffix in ("svg", "png")]
    for path in written:
        save_figure(figures[path.stem], path)
    for name, forecast in plan.forecasts.items():
        memory_csv = partial(
            write_memory_csv,
            version_bytes=version_bytes(forecast.program.schedule, plan.cut.costs),
        )
        for kind, write in (
            ("actions.csv", write_actions_csv),
            ("memory.csv", memory_csv),
            ("comms.csv", write_comms_csv),
            ("trace.json", write_perfetto),
        ):
            written.append(folder / f"{name}-{kind}")
            with replacing(written[-1]) as file:
                write(forecast.trace, file)
    return written
