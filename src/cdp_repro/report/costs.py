"""The cost table: what each setting costs, by closed form, by simulation and by execution.

Closed forms hold for S = N stages of any sizes. In their notation stage j keeps a_j activation bytes of a micro-batch
that waits for its backward, and e_j more until its output has been sent; it has p_j parameter bytes, and as many of
gradients; A = sum of a_j, P = sum of p_j; o_j are the bytes of its output, i_j those of the gradient of its input.
They are derived in the documentation of `closed_form`, and checked here against what ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from cdp_repro.report.groups import Group
from cdp_repro.report.tables import Table
from cdp_repro.schedule import Schedule, StageCosts, simulate_totals
from cdp_repro.units import format_bytes

QUANTITIES = (
    "devices", "activation_bytes_per_device", "activation_bytes_total", "parameter_bytes_per_device",
    "optimizer_bytes_per_device", "versions_kept", "sent_bytes_per_device", "messages_per_slot", "chain", "idle_share",
)  # fmt: skip

SIMULATED_STEPS = 4
"""Training steps of a simulation: from the third on the pipeline is full and repeats itself."""

Values = dict[str, float]
"""Numbers by quantity; what is not known is missing."""


@dataclass(frozen=True)
class Setting:
    """One row of the cost table."""

    name: str
    """For people."""
    mode: str
    placement: str
    pipeline_schedule: str = "one_f_one_b"
    baseline: str | None = None

    def schedule(self, workers: int) -> Schedule:
        """Return the schedule for N = S, which is validated as it runs."""
        return Schedule.build(
            self.mode, workers, placement=self.placement, pipeline_schedule=self.pipeline_schedule, ahead=False
        )


PLACEMENT_NAMES = {
    "single_device": "single device",
    "replicated": "replicated",
    "model_parallel": "model parallel",
    "pipeline": "pipeline",
    "zero": "ZeRO",
}


def _settings() -> list[Setting]:
    found = [Setting("single device, gradient accumulation", "accumulation", "single_device")]
    for placement, name in PLACEMENT_NAMES.items():
        if placement == "pipeline":
            found.append(Setting("pipeline, GPipe", "dp", placement, "gpipe"))
            found.append(Setting("pipeline, 1F1B", "dp", placement))
        else:
            found.append(Setting(name, "dp", placement))
        found += [Setting(name, mode, placement) for mode in ("cdp_v1", "cdp_v2")]
    peers = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard", "torch_gpipe": "ScheduleGPipe",
             "torch_1f1b": "Schedule1F1B"}  # fmt: skip
    return [*found, *(Setting(f"torch {name}", "dp", "single_device", baseline=key) for key, name in peers.items())]


SETTINGS = _settings()


@dataclass(frozen=True)
class Sizes:
    """What the closed forms need to know of the stages; each tuple has one entry a stage."""

    kept: Sequence[int]
    """a_j: activation bytes of a waiting micro-batch."""
    leaving: Sequence[int]
    """e_j: bytes of its output beyond a_j, until it has been sent."""
    parameters: Sequence[int]
    gradients: Sequence[int]
    outputs: Sequence[int]
    input_gradients: Sequence[int]

    @classmethod
    def of(cls, costs: StageCosts, moves: bool) -> Sizes:
        """Return the sizes; `moves` says whether micro-batches go from rank to rank between stages."""
        stages = range(costs.stages)
        received = [costs.received_bytes(j)[0] if moves and j else 0 for j in stages]
        leaving = [costs.left_bytes(j) if moves and j < costs.stages - 1 else 0 for j in stages]
        return cls(
            kept=[costs.forward_bytes[j] + received[j] - leaving[j] for j in stages],
            leaving=leaving,
            parameters=costs.parameter_bytes,
            gradients=costs.gradient_bytes,
            outputs=costs.output_bytes,
            input_gradients=costs.input_gradient_bytes,
        )


def closed_form(setting: Setting, workers: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return what the formulas say of a setting with N = S workers.

    - Activations. In the cyclic timeline stage j keeps a micro-batch from slot 2m+j to 2m+2N-1-j, and one starts every
      second slot: N-j are alive in every slot. All workers' sum is sum (N-j) a_j, (N+1)/2 A for equal stages, against
      N A of data parallelism. A worker's own peak is A; a pipeline's device j holds (N-j) a_j, a device of a
      model-parallel group a_j. Where micro-batches move, outputs that are about to be sent add e_j on the stages that
      run a forward, which are every second one.
    - Versions. A stale stage has two, each for a part of the time, on the ranks that all workers read from; a worker's
      own replica has one at a time. CDP-v2's last stage is always fresh.
    - Messages. Gradients: N-1 partial sums and N-1 relayed totals of each stage (replicated, both modes); one
      parameter message for each forward and backward and one gradient to the owner (ZeRO), but none of the owner's own
      to itself: 3P(N-1)/N a rank; sums along a stage's group of n ranks and totals back: N-1 + n-1 where n > 1
      (model parallel). Activations and their gradients: N of each over each boundary.
    - Idle share. A pipeline with a flush idles (N-1)/(2N-1), a model-parallel group of N 1 - 1/N, of N-j
      (N-1)/(N+1); all others never.
    """
    if setting.baseline is not None:
        return _closed_form_of_peer(setting.baseline, workers, costs, optimizer_states)
    n = workers
    moves = setting.placement in ("pipeline", "model_parallel")
    sizes = Sizes.of(costs, moves)
    values: Values = {"devices": _devices(setting, n)}
    values |= _activations(setting, n, sizes) | _state(setting, n, sizes, optimizer_states)
    values |= _messages(setting, n, sizes) | {"idle_share": _idle_share(setting, n)}
    return values


def _devices(setting: Setting, n: int) -> int:
    if setting.placement == "single_device":
        return 1
    if setting.placement == "model_parallel":
        return n * n if setting.mode == "dp" else n * (n + 1) // 2
    return n


def _activations(setting: Setting, n: int, sizes: Sizes) -> Values:
    kept, leaving = sizes.kept, sizes.leaving
    whole, stages = sum(kept), range(n)
    triangle = sum((n - j) * kept[j] for j in stages)
    if setting.mode == "accumulation":
        return {"activation_bytes_per_device": whole, "activation_bytes_total": whole}
    staggered = setting.mode != "dp" or (setting.placement == "pipeline" and setting.pipeline_schedule != "gpipe")
    total = triangle if staggered else n * whole
    if setting.placement == "pipeline":
        per_device = max((n - j if staggered else n) * kept[j] + leaving[j] for j in stages)
    elif setting.placement == "model_parallel":
        per_device = max(kept[j] + leaving[j] for j in stages)
    else:
        per_device = total if setting.placement == "single_device" else whole
    values: Values = {"activation_bytes_per_device": per_device, "activation_bytes_total": total}
    if any(leaving):  # how many outputs are about to be sent at once depends on the sizes
        del values["activation_bytes_total"]
    return values


def _state(setting: Setting, n: int, sizes: Sizes, optimizer_states: int) -> Values:
    p = sizes.parameters
    stale = [setting.mode == "cdp_v1" or (setting.mode == "cdp_v2" and j < n - 1) for j in range(n)]
    if setting.placement == "replicated":
        stale = [False] * n  # a worker's own replica: the old version has no reader once the new one is made
    elif setting.placement == "model_parallel":
        stale = [setting.mode == "cdp_v1" and j == n - 1 for j in range(n)]  # all other groups have several ranks
    held = [(1 + is_stale) * size for is_stale, size in zip(stale, p, strict=True)]
    shared = setting.placement in ("single_device", "replicated")
    is_v2_on_one = setting.mode == "cdp_v2" and setting.placement == "single_device"
    together = sum(p) + _overlap_of_v2(n, p) if is_v2_on_one else sum(held)
    return {
        "parameter_bytes_per_device": together if shared else max(held),
        "optimizer_bytes_per_device": optimizer_states * (sum(p) if shared else max(p)),
        "versions_kept": 1 + any(stale),
    }


def _overlap_of_v2(n: int, p: Sequence[int]) -> int:
    """Return the bytes of second versions that CDP-v2 keeps at once on one device.

    Stage j has two from slot 2Nt + 4N-3-j, when the new one is made, until 2Nt + 6N-6-3j, after which no stale worker
    i <= N-2-j reads the old one. So right after stage k has got its second, two have the stages
    k <= j <= (2N-3+k)/3, and of the step before j <= (k-3)/3.
    """

    def at(k: int) -> int:
        return sum(p[k : min((2 * n - 3 + k) // 3, n - 2) + 1]) + sum(p[: k // 3])

    return max(map(at, range(n - 1)), default=0)


def _messages(setting: Setting, n: int, sizes: Sizes) -> Values:
    total = sum(sizes.gradients)
    boundary = n * (sum(sizes.outputs[:-1]) + sum(sizes.input_gradients[1:]))
    is_dp = setting.mode == "dp"
    if setting.placement == "single_device":
        return {"sent_bytes_per_device": 0, "messages_per_slot": 0, "chain": 0}
    if setting.placement == "replicated":
        sent, chain = 2 * total * (n - 1) / n, 2 * (n - 1) if is_dp else 1
        messages = 2 * (n - 1) if is_dp else 1 if (setting.mode, n) == ("cdp_v1", 2) else n
    elif setting.placement == "zero":
        sent = (2 * sum(sizes.parameters) + total) * (n - 1) / n
        messages = 2 * (n - 1) if is_dp else -(-3 * n // 2)
        chain = 1 if setting.mode == "cdp_v1" else 2
    elif setting.placement == "pipeline":
        sent, messages, chain = boundary / n, n - 1 if is_dp else n // 2 * 2, 1
    else:
        ranks = [n if is_dp else n - j for j in range(n)]
        sums = sum((n - 1 + r - 1) * size for r, size in zip(ranks, sizes.gradients, strict=True) if r > 1)
        sent = (boundary + sums) / sum(ranks)
        messages, chain = (2 * n, 2 * (n - 1)) if is_dp else (2 * (n - 1), 1)
    values: Values = {"sent_bytes_per_device": sent, "messages_per_slot": messages, "chain": chain}
    if (setting.placement, setting.mode) == ("model_parallel", "cdp_v2"):
        del values["messages_per_slot"]  # 2(N-1) up to N = 6, less beyond: which totals meet in a slot depends on N
    return values


def _idle_share(setting: Setting, n: int) -> float:
    if setting.placement == "pipeline" and setting.mode == "dp":
        return (n - 1) / (2 * n - 1)
    if setting.placement == "model_parallel":
        return 1 - 1 / n if setting.mode == "dp" else (n - 1) / (n + 1)
    return 0.0


def _closed_form_of_peer(baseline: str, n: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return the published costs of a library: a ring all-reduce, two all-gathers and a reduce-scatter."""
    p, g = costs.parameter_bytes, sum(costs.gradient_bytes)
    values: Values = {"devices": n, "versions_kept": 1}
    if baseline == "ddp":
        sent, held = 2 * g * (n - 1) / n, float(sum(p))
    elif baseline == "fsdp2":
        sent, held = (2 * sum(p) + g) * (n - 1) / n, sum(p) / n
    else:
        sent = sum(costs.output_bytes[:-1]) + sum(costs.input_gradient_bytes[1:])
        held = float(max(p))
        values["idle_share"] = (n - 1) / (2 * n - 1)
    return values | {
        "sent_bytes_per_device": sent,
        "parameter_bytes_per_device": held,
        "optimizer_bytes_per_device": optimizer_states * held,
    }


def simulated(setting: Setting, workers: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return what simulation says of the full pipeline, fill included and drain not.

    Peaks are those of all slots; what is sent and how long ranks idle is of the last training step.
    """
    schedule = setting.schedule(workers)
    step = schedule.mode.slots_per_step
    full = takewhile(lambda slot: slot.number < SIMULATED_STEPS * step, schedule.slots(count()))
    totals = list(simulate_totals(schedule, costs, full))
    last = totals[-step:]
    return {
        "devices": schedule.ranks,
        "activation_bytes_per_device": max(slot.activation_bytes_per_device for slot in totals),
        "activation_bytes_total": max(slot.activation_bytes for slot in totals),
        "parameter_bytes_per_device": max(slot.state_bytes_per_device for slot in totals),
        "optimizer_bytes_per_device": optimizer_states * max(schedule.placement.held(costs.parameter_bytes)),
        "versions_kept": max(slot.versions_kept for slot in totals),
        "sent_bytes_per_device": sum(slot.bytes_sent for slot in last) / schedule.ranks,
        "messages_per_slot": max(slot.messages for slot in totals),
        "chain": max(slot.chain for slot in totals),
        "idle_share": 1 - sum(slot.computing_ranks for slot in last) / (schedule.ranks * step),
    }


def executed(group: Group) -> Values:
    """Return what a run has measured; of a baseline, which is not traced, only what it holds."""
    found = {
        "devices": "ranks",
        "parameter_bytes_per_device": "memory/parameter_bytes_per_device",
        "optimizer_bytes_per_device": "memory/optimizer_bytes_per_device",
    }
    if group.config["baseline"] is None:
        found |= {
            "activation_bytes_per_device": "memory/activation_peak_bytes_per_device",
            "activation_bytes_total": "memory/activation_peak_bytes_total",
            "parameter_bytes_per_device": "memory/parameter_peak_bytes_per_device",
            "versions_kept": "memory/versions_kept",
            "sent_bytes_per_device": "comm/bytes_per_device_per_step",
            "messages_per_slot": "comm/max_messages_per_slot",
            "chain": "comm/max_chain_per_slot",
            "idle_share": "time/idle_share_of_slots",
        }
    return {quantity: float(group.rows[0].summary[key]) for quantity, key in found.items()}


# --- table ---------------------------------------------------------------------------------------------------------

EXECUTED_WORKERS = (2, 3, 4)
SIMULATED = "simulated.json"
"""File of the simulations that are too long to repeat with every report."""

_SHORT = {
    "devices": "devices",
    "activation_bytes_per_device": "activations a device",
    "activation_bytes_total": "activations in all",
    "parameter_bytes_per_device": "parameters a device",
    "optimizer_bytes_per_device": "optimizer a device",
    "versions_kept": "versions kept",
    "sent_bytes_per_device": "sent a device and step",
    "messages_per_slot": "messages a slot",
    "chain": "longest chain",
    "idle_share": "idle slots",
}


@dataclass(frozen=True)
class Line:
    """One setting with N workers: what formulas, simulation and execution say, as far as they say anything."""

    setting: Setting
    workers: int
    closed: Values
    simulated: Values
    executed: Values

    def disagreements(self) -> list[str]:
        """Return the quantities on which two of the three differ."""
        return [quantity for quantity in QUANTITIES if len(self._known(quantity)) and not self._alike(quantity)]

    def text(self, quantity: str) -> str:
        """Return the number, and which of the three say it if not all do; all numbers where they differ."""
        known = self._known(quantity)
        if not known:
            return "–"
        if self._alike(quantity):
            marks = "" if len(known) == 3 else f" ({', '.join(known)})"
            return f"{_number(quantity, next(iter(known.values())))}{marks}"
        return "; ".join(f"{source} {_number(quantity, value)}" for source, value in known.items())

    def _known(self, quantity: str) -> Values:
        sources = {"c": self.closed, "s": self.simulated, "e": self.executed}
        return {mark: values[quantity] for mark, values in sources.items() if quantity in values}

    def _alike(self, quantity: str) -> bool:
        values = self._known(quantity).values()
        return max(values) - min(values) <= 1e-9 * max(1.0, max(values))


def _number(quantity: str, value: float) -> str:
    if "bytes" in quantity:
        return format_bytes(value)
    return f"{100 * value:.1f} %" if quantity == "idle_share" else f"{value:g}"


def lines(groups: Sequence[Group]) -> list[Line]:
    """Return every setting for every N that was executed, with the costs of the network that ran."""
    by_setting = {(_key(group), group.config["workers"]): group for group in groups}
    found = []
    for workers in EXECUTED_WORKERS:
        costs = next((g.rows[0].costs for (_, n), g in by_setting.items() if n == workers), None)
        if costs is None:
            continue
        for setting in SETTINGS:
            group = by_setting.get((_setting_key(setting), workers))
            found.append(
                Line(
                    setting,
                    workers,
                    closed_form(setting, workers, costs, optimizer_states=1),
                    {} if setting.baseline else simulated(setting, workers, costs, optimizer_states=1),
                    executed(group) if group else {},
                )
            )
    return found


def large_lines(simulations: Mapping[str, Mapping[str, Values]]) -> list[Line]:
    """Return the settings for every N of `simulations` ({N: {setting and mode: values}}), of equal stages."""
    return [
        Line(setting, int(n), closed_form(setting, int(n), unit_costs(int(n)), 1), values[key], {})
        for n, values in simulations.items()
        for setting in SETTINGS
        if (key := simulation_key(setting)) in values
    ]


def unit_costs(workers: int) -> StageCosts:
    """Return equal stages: A and P are N KiB, so that the table reads in A/N and P/N."""
    return StageCosts.equal(workers, activation_bytes=1024, parameter_bytes=1024)


def simulation_key(setting: Setting) -> str:
    """Return the name of a setting in the file of simulations."""
    return f"{setting.name}, {setting.mode}"


def _key(group: Group) -> tuple[str, str, str | None, str]:
    config = group.config
    return group.mode, config["placement.name"], config["baseline"], config["pipeline_schedule"]


def _setting_key(setting: Setting) -> tuple[str, str, str | None, str]:
    return setting.mode, setting.placement, setting.baseline, setting.pipeline_schedule


def cost_table(found: Sequence[Line], workers: int, notes: Sequence[str]) -> Table:
    """Return the table of N = `workers`."""
    rows = [
        [line.setting.name, line.setting.mode, *(line.text(quantity) for quantity in QUANTITIES)]
        for line in found
        if line.workers == workers
    ]
    title = f"What each setting costs with N = S = {workers}"
    return Table(f"costs_N{workers}", title, ("setting", "mode", *_SHORT.values()), rows, notes)


def agreement_table(found: Sequence[Line]) -> Table:
    """Return every number of every N by closed form, simulation and execution."""
    rows = []
    for line in found:
        for quantity in QUANTITIES:
            values = [values.get(quantity) for values in (line.closed, line.simulated, line.executed)]
            if any(value is not None for value in values):
                differs = quantity in line.disagreements()
                texts = ["" if value is None else f"{value:.10g}" for value in values]
                rows.append(
                    [
                        str(line.workers),
                        line.setting.name,
                        line.setting.mode,
                        quantity,
                        *texts,
                        "no" if differs else "yes",
                    ]
                )
    columns = ("N", "setting", "mode", "quantity", "closed form", "simulated", "executed", "agree")
    return Table("costs_all", "Closed form, simulation and execution", columns, rows, for_readers=False)


def large_table(found: Sequence[Line]) -> Table:
    """Return the settings of large N, a row a setting, where formulas and simulation agree."""
    shown = (
        "activation_bytes_per_device",
        "activation_bytes_total",
        "sent_bytes_per_device",
        "messages_per_slot",
        "chain",
        "idle_share",
    )
    rows = [
        [str(line.workers), line.setting.name, line.setting.mode, f"{line.closed['devices']:g}",
         *(line.text(quantity).removesuffix(" (c, s)") for quantity in shown),
         ", ".join(line.disagreements()) or "none"]
        for line in found
    ]  # fmt: skip
    columns = ("N", "setting", "mode", "devices", *(_SHORT[quantity] for quantity in shown), "disagreements")
    notes = [
        "Equal stages of 1 KiB of activations and 1 KiB of parameters each, so that A = P = N KiB. A number "
        "stands for closed form and simulation alike; (s): simulation only."
    ]
    return Table("costs_large", "What each setting costs with many workers", columns, rows, notes)
