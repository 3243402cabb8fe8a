"""The tables of docs/benchmarks.md, and the picture of the links, from the results of the benches."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benches.links import MODES, NETWORKS
from cdp_repro.report.charts import style
from cdp_repro.report.evidence import origin

RESULTS = Path(__file__).parents[2] / "results" / "bench"


def tables() -> str:
    """Return the tables of docs/benchmarks.md from the results."""
    timing = json.loads((RESULTS / "overhead.json").read_text())
    lines = [
        "| step time over a gradient-accumulation loop | threads | median | quartiles |",
        "| --- | --- | --- | --- |",
    ]
    for row in timing["rows"]:
        for name, ratio in row["ratios"].items():
            lines.append(
                f"| {row['network']}, {name} | {row['threads']} | {ratio['median']:.3f} | {_quartiles(ratio, 3)} |"
            )
    rounds = f"{timing['rounds']} alternating rounds of training steps in a row, {timing['steps_per_round']} a round"
    lines += ["", f"{rounds}; {timing['config']}; {_evidence(timing)}.", ""]
    lines += _method_table()
    lines += _program_table()
    speed = json.loads((RESULTS / "placements.json").read_text())
    lines += ["| throughput of cdp_v2 / the library's | median | quartiles | planned |", "| --- | --- | --- | --- |"]
    for name, ratio in speed["throughput_ratios"].items():
        bucket = speed["ddp_bucket_mib"].get(name)
        shown = f"{name} with buckets of {bucket} MiB" if bucket else name
        lines.append(f"| {shown} | {ratio['median']:.2f} | {_quartiles(ratio)} | {speed['planned_ratios'][name]:.2f} |")
    lines += ["", f"{speed['rounds']} alternating rounds; {speed['config']}; {_evidence(speed)}."]
    return "\n".join(lines + _pipeline_tables() + _server_table() + _link_tables())


def _quartiles(ratio: Mapping[str, float], digits: int = 2) -> str:
    return f"{ratio['quartile_low']:.{digits}f} to {ratio['quartile_high']:.{digits}f}"


def _method_table() -> list[str]:
    """Return what each method against delay takes of the time of a step."""
    found = json.loads((RESULTS / "methods.json").read_text())
    lines = ["| method against delay | step time over dp | quartiles |", "| --- | --- | --- |"]
    for row in found["rows"]:
        ratio = row["over_dp"]
        lines.append(f"| {row['dataset']}: `{row['overrides']}` | {ratio['median']:.2f} | {_quartiles(ratio)} |")
    return [*lines, "", f"{found['rounds']} alternating rounds; {found['config']}; {_evidence(found)}.", ""]


def _program_table() -> list[str]:
    """Return what programs cost: a row for each placement, a column for each number of workers."""
    found = json.loads((RESULTS / "programs.json").read_text())
    cells = {(row["mode"], row["placement"], row["workers"]): row for row in found["rows"]}
    numbers = sorted({row["workers"] for row in found["rows"]})
    header = " | ".join(f"N = {n}" for n in numbers)
    lines = [f"| start [CPU s], cost of an own action [us] | {header} |", "| --- |" + " --- |" * len(numbers)]
    for mode, placement in dict.fromkeys((row["mode"], row["placement"]) for row in found["rows"]):
        each = [cells[mode, placement, n] for n in numbers]
        texts = [f"{row['start_cpu_seconds']:.2f}, {row['microseconds_per_action']:.1f}" for row in each]
        lines.append(f"| {mode}, {placement} | {' | '.join(texts)} |")
    return [*lines, "", f"{found['config']}; {_evidence(found)}.", ""]


def _pipeline_tables() -> list[str]:
    """Return our pipelines beside torch's."""
    found = json.loads((RESULTS / "pipelines.json").read_text())
    lines = ["", "| schedule of torch | best number of micro-batches | time of a step over the fastest's |"]
    lines.append("| --- | --- | --- |")
    for name, row in found["library"].items():
        lines.append(f"| {name} | {row['micro_batches']} | {row['over_fastest']:.2f} |")
    lines += ["", f"| time of a step of ours | M | over {found['fastest']} | over the same schedule of torch |"]
    lines.append("| --- | --- | --- | --- |")
    for row in found["rows"]:
        cells = [
            f"{ratio['median']:.2f} ({_quartiles(ratio)})"
            for ratio in (row["ratios"].get(over) for over in ("the fastest", "the same")) if ratio
        ]  # fmt: skip
        lines.append(f"| {row['mode']} | {row['micro_batches']} | {cells[0]} | {''.join(cells[1:])} |")
    return [*lines, "", f"Medians and quartiles of {found['rounds']} alternating rounds; {found['config']}; "
            f"{_evidence(found)}."]  # fmt: skip


def _server_table() -> list[str]:
    """Return what more servers are worth where links are limited."""
    found = json.loads((RESULTS / "servers.json").read_text())
    lines = ["", "| time of a step over that with one server | servers | median | quartiles | priced |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in found["rows"]:
        lines.append(
            f"| {row['mode']} | {row['servers']} | {row['median']:.2f} | {_quartiles(row)} | {row['priced']:.2f} |"
        )
    return [*lines, "", f"{found['rounds']} alternating rounds; {found['config']}; {_evidence(found)}."]


def _link_tables() -> list[str]:
    """Return the curves over link rates as tables, and their picture."""
    lines = [
        "",
        "![Throughput of CDP over DistributedDataParallel against the rate of the link](../results/bench/links.svg)",
    ]
    for curve in link_curves():
        head = [f"{mode} / ddp | planned" for mode in MODES]
        first = f"| {curve['model']}: link [Mbit/s] | link time / compute time | bucket of ddp [MiB]"
        lines += ["", f"{first} | {' | '.join(head)} |"]
        lines.append("| --- | --- | --- |" + " --- | --- |" * len(MODES))
        for row in curve["rows"]:
            bucket = row["ddp_bucket_mib"]
            cells = [row["rate_mbit"] or "unlimited", f"{row['link_seconds_over_compute']:.2f}", bucket]
            for mode in MODES:
                ratio = row["throughput_ratios"][mode]
                cells += [f"{ratio['median']:.2f} ({_quartiles(ratio)})"]
                cells += [f"{row['planned_ratios'][mode]:.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        rounds = f"{curve['rounds']} alternating rounds of {curve['steps_per_round']} training steps"
        lines += ["", f"{rounds}; {curve['config']}; {_evidence(curve)}."]
    return lines


def link_curves() -> list[dict[str, Any]]:
    """Return what was measured over links, of each network."""
    paths = [RESULTS / f"{name}.json" for name in NETWORKS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def draw_links(curves: Sequence[dict[str, Any]]) -> Figure:
    """Draw throughput over DistributedDataParallel's against link time over compute time, measured and planned."""
    figure = Figure(figsize=(4.2 * len(curves), 3.2), layout="constrained")
    for axis, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        rows = sorted(curve["rows"], key=lambda row: row["link_seconds_over_compute"])
        x = [row["link_seconds_over_compute"] for row in rows]
        for mode in MODES:
            look = style(mode)
            ratios = [row["throughput_ratios"][mode] for row in rows]
            axis.plot(x, [ratio["median"] for ratio in ratios], "o-", color=look["color"], label=f"{mode}, measured")
            low, high = ([ratio[key] for ratio in ratios] for key in ("quartile_low", "quartile_high"))
            axis.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            axis.plot(
                x, [row["planned_ratios"][mode] for row in rows], ":", color=look["color"], label=f"{mode}, planned"
            )
        axis.axhline(1, color="#555555", linestyle="--", linewidth=1)
        axis.set(xscale="log", title=curve["model"], xlabel="time of all gradients on the link / compute time")
        ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if x[0] / 1.5 < tick < 1.5 * x[-1]]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("throughput over torch's DDP")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _evidence(result: dict[str, str]) -> str:
    return f"`{result['command']}`, {origin([result])}"
