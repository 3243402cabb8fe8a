"""The explorer: programs on one page that opens without a network, to scroll, zoom, play and ask.

The page holds the actions of each system as the program writes them, with what `simulate` says of each slot; the
scripts in `web/` read and draw them.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cdp_repro.config import ConfigError
from cdp_repro.observe.text import format_bytes
from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.simulate import held_bytes, simulate_slots, version_bytes
from cdp_repro.predict.system_specs import CHUNKS, CommonSizes
from cdp_repro.report.template import filled, web_file
from cdp_repro.schedule import Program, Schedule, Slot
from cdp_repro.trace import Trace

MOST_BYTES = 1_000_000
"""The most bytes of a page; systems that would make it larger are left out."""

_LAYER_BYTES = 2**20
"""Bytes of activations, and of parameters, of one of the equal layers."""

_SCRIPTS = ("program.js", "drawing.js", "details.js", "explorer.js")
"""In the order in which they stand on the page."""


def explorer(title: str, systems: Iterable[tuple[Schedule, StageCosts]]) -> tuple[str, list[str]]:
    """Return the page of some systems, the first shown first, and the names of those left out.

    Raises:
        ConfigError: the first system alone makes a page of more than `MOST_BYTES`.
    """
    size = len(_page(title, []).encode())
    shown: list[str] = []
    left_out: list[str] = []
    for schedule, costs in systems:
        text = json.dumps(_system(schedule, costs), separators=(",", ":")).replace("</", "<\\/")
        added = len(text.encode()) + 1
        if size + added > MOST_BYTES:
            if not shown:
                raise _too_large(schedule, size + added)
            left_out.append(_name(schedule))
            continue
        shown.append(text)
        size += added
    assert shown, "there is a system to show"
    return _page(title, shown), left_out


def _too_large(schedule: Schedule, size: int) -> ConfigError:
    workers = schedule.spec.workers
    fitting = max(1, math.isqrt(workers**2 * MOST_BYTES // size))  # actions grow with ranks times slots
    return ConfigError(
        [f"{_name(schedule)} with workers={workers} makes a page of {size:,} bytes, more than {MOST_BYTES:,}: use "
         f"workers={fitting} or fewer, or --program=FILE"]
    )  # fmt: skip


def _page(title: str, systems: Sequence[str]) -> str:
    return filled(
        "explorer.html",
        title=html.escape(title),
        style=web_file("explorer.css"),
        script="\n".join(map(web_file, _SCRIPTS)),
        systems=f"[{','.join(systems)}]",
    )


def explorer_of_equal_layers(ranks: int) -> str:
    """Return the page of all systems on `ranks` ranks, for a network of as many equal layers as any has stages."""
    layers = ranks * CHUNKS

    def costs(stages: int) -> StageCosts:
        equal = StageCosts.equal(stages, layers // stages * _LAYER_BYTES, layers // stages * _LAYER_BYTES)
        between = (_LAYER_BYTES,) * (stages - 1)  # whatever a stage holds, one layer's output leaves it
        return replace(equal, output_bytes=(*between, 0), input_gradient_bytes=(0, *between))

    page, _ = explorer(
        f"{layers} equal layers of {format_bytes(_LAYER_BYTES)}, N = {ranks}",
        ((Schedule.from_spec(spec), costs(spec.stages)) for spec in CommonSizes(ranks).specs()),
    )
    return page


def _name(schedule: Schedule) -> str:
    return f"{schedule.mode}, {schedule.spec.placement}{', collectives' if schedule.spec.collectives else ''}"


def _system(schedule: Schedule, costs: StageCosts) -> dict[str, Any]:
    """Return everything the page knows about a system: fill, one period and the drain, in whole mini-batches."""
    program = Program(schedule)
    run, _ = program.run_from(0)
    each = -(-schedule.sizes.lanes // schedule.micro_batches)  # training steps of a mini-batch
    steps = -(-(len(run.fill) + 2) // each) * each
    slots = program.slots(steps)
    return {
        "name": _name(schedule),
        "ranks": schedule.ranks,
        "lanes": schedule.sizes.lanes,
        "laneOrder": schedule.timeline.lanes.order,
        "durations": schedule.timeline.lanes.durations,
        "microBatches": schedule.micro_batches,
        "summed": schedule.sizes.summed,
        "period": [program.begin(len(run.fill)), program.begin(len(run.fill) + 1)],
        "slots": ["\n".join(f"{action.rank} {action}" for action in slot.actions) for slot in slots],
        **_bytes(simulate_slots(schedule, costs, slots), slots, schedule, costs),
    }


def _bytes(trace: Trace, slots: Sequence[Slot], schedule: Schedule, costs: StageCosts) -> dict[str, list[list[int]]]:
    """Return bytes by slot and rank: activations at the peak, parameter versions at the slot's end, and sent."""
    size = version_bytes(schedule, costs)
    records = {(record.slot, record.rank): record for record in trace.records}
    holds = [0] * schedule.ranks
    kept = held_bytes(schedule, costs)
    found: dict[str, list[list[int]]] = {"activations": [], "parameters": [], "sent": []}
    for slot in slots:
        peaks = [*holds]
        for rank in range(schedule.ranks):
            if record := records.get((slot.number, rank)):
                peaks[rank], holds[rank] = record.activation_peak_bytes, record.activation_bytes_at_end
                kept[rank] = sum(number * size(rank, stage) for stage, number in enumerate(record.versions))
        found["activations"].append(peaks)
        found["parameters"].append([*kept])
        found["sent"].append([0] * schedule.ranks)
    for message in trace.messages:
        found["sent"][message.slot][message.source] += message.bytes
    return found
