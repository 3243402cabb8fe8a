"""Measure overhead, methods against delay, programs, placements, pipelines, servers and links.

Usage: python scripts/bench.py [overhead] [methods] [programs] [placements] [pipelines] [servers]
                                [links_resnet18] [links_vit]

Writes results/bench/*.json.

Without names: all. Servers and links are between network namespaces, which takes root.

Contenders are timed in turns, in alternating rounds in the same process, or in the same ranks, and reported as ratios
with their spread. `servers` starts its ranks anew for each number of servers in each round, and compares them within a
round. `programs` reports the CPU seconds of single programs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from bench_methods import methods
from bench_pipelines import pipelines
from bench_servers import servers
from bench_timing import alternating_rounds, fastest_of, ratio_spread, seconds_of, sgd, steady_step_seconds
from matplotlib.figure import Figure
from torch.autograd.graph import GradientEdge, get_gradient_edge
from two_hosts import two_hosts

from cdp_repro import Engine
from cdp_repro.baselines import baseline_class
from cdp_repro.baselines.baseline import Baseline
from cdp_repro.baselines.torch_data_parallel import DDPBaseline
from cdp_repro.cli.console import run_script
from cdp_repro.config import RunConfig
from cdp_repro.config.errors import nearest, refuse
from cdp_repro.config.schema import DatasetConfig, ModelConfig
from cdp_repro.launch import launch
from cdp_repro.launch.allocator import keep_freed_memory
from cdp_repro.launch.process_group import process_group
from cdp_repro.observe.atomic_file import replace_file
from cdp_repro.observe.figures import save_figure
from cdp_repro.observe.versions import versions
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing import Cluster, Collectives, Link
from cdp_repro.predict.pricing.calibration import measure_network, measure_stages, network_of, time_messages
from cdp_repro.predict.pricing.quote import prices_on_each
from cdp_repro.report.charts import style
from cdp_repro.report.evidence import origin
from cdp_repro.schedule import PLACEMENTS, Op, Program, RankProgram, Schedule

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench"
ROUNDS = 16
STEPS_PER_ROUND = 4
"""Training steps one after the other, as a training has them: a run of the engine begins and drains its timeline, which
a training does once between checkpoints, and the first step after another contender's finds its memory cold."""
OVERHEAD_WORKERS, OVERHEAD_MICRO_BATCH = 4, 16
PROGRAM_WORKERS = (4, 16, 64, 256)
PROGRAM_MODES = ("dp", "cdp_v1", "cdp_v2")
MOST_FORWARDS = 400_000
"""In a hundred steps or fewer, on a single device: what the cost of an action is measured over."""


def main(names: list[str]) -> None:
    benches: dict[str, Callable[[], dict[str, Any]]] = {
        "overhead": overhead, "methods": methods, "programs": programs, "placements": placements,
        "pipelines": pipelines, "servers": servers,
        **{name: partial(links, name) for name in LINK_NETWORKS},
    }  # fmt: skip
    refuse(
        f"unknown bench {name!r}: choose {', '.join(benches)}{nearest(name, benches)}"
        for name in names
        if name not in benches
    )
    made_by = versions()  # before the first result is written, with which the tree has changes
    for name in names or benches:
        result = {"command": f"python scripts/bench.py {name}", **made_by, **benches[name]()}
        RESULTS.mkdir(parents=True, exist_ok=True)
        replace_file(RESULTS / f"{name}.json", f"{json.dumps(result, indent=2)}\n".encode())
        if name in LINK_NETWORKS:
            save_figure(draw_links(_link_curves()), RESULTS / "links.svg")


# --- overhead -----------------------------------------------------------------------------------------------------


NETWORKS = (
    ("resnet18", 32, 4, 2),
    ("resnet18", 32, 4, 1),
    ("vit_tiny_patch16_224", 64, 8, 2),
    ("vit_tiny_patch16_224", 64, 8, 1),
)
"""Model, pixels, S, threads: kernels of the second are small."""


def overhead() -> dict[str, object]:
    """Step time of the engine over a hand-written gradient-accumulation loop."""
    keep_freed_memory()  # as cdp-train does; it is of the process, so of all contenders
    threads_before = torch.get_num_threads()
    rows = [_overhead_of(*network) for network in NETWORKS]
    torch.set_num_threads(threads_before)
    return {
        "config": f"N = {OVERHEAD_WORKERS}, micro-batch {OVERHEAD_MICRO_BATCH}, cdp_v2, single_device, fp32",
        "rounds": ROUNDS,
        "steps_per_round": STEPS_PER_ROUND,
        "rows": rows,
    }


def _overhead_of(model: str, pixels: int, stages: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    size = OVERHEAD_WORKERS * OVERHEAD_MICRO_BATCH
    config = replace(_config(model, pixels, OVERHEAD_WORKERS, size, "flops"), stages=stages)
    torch.manual_seed(0)
    batch = torch.randn(size, *config.input_shape), torch.randint(0, 10, (size,))
    contenders = {
        "gradient accumulation": _accumulation_loop(config, batch),
        "the same order by hand": _loop_by_hand(config, batch),
        "engine": _engine_loop(config, batch, traced_steps=0),
        "engine, metering on": _engine_loop(config, batch, traced_steps=10**9),
    }
    seconds = alternating_rounds({name: partial(seconds_of, run) for name, run in contenders.items()}, ROUNDS)
    print(f"{model}, {threads} threads: {ROUNDS} rounds", flush=True)
    base = seconds.pop("gradient accumulation")
    over_base = {name: ratio_spread(each, base) for name, each in seconds.items()}
    return {"network": f"{model}, {pixels} px, S = {stages}", "threads": threads, "ratios": over_base}


def _accumulation_loop(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    model = torch.nn.Sequential(*cut_model(config).stages).train()
    optimizer = sgd(list(model.parameters()))

    def run() -> None:
        for _ in range(STEPS_PER_ROUND):
            for inputs, targets in zip(*(part.chunk(config.workers) for part in batch), strict=True):
                (F.cross_entropy(model(inputs), targets) / config.workers).backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _loop_by_hand(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Return the forwards, backwards and updates of cdp_v2 in its order, by plain autograd: what the order costs.

    Two copies of the stages take turns in place of versions, and the second takes over the parameters of the first
    where an update keeps the version before: as much work, with other numbers.
    """
    workers, last = config.workers, config.stages - 1
    copies = [cut_model(config).stages for _ in range(2)]
    optimizers = [[sgd(list(stage.train().parameters())) for stage in stages] for stages in copies]
    parameters = [[[each.data for each in stage.parameters()] for stage in stages] for stages in copies]
    program = Program(Schedule.build("cdp_v2", workers, config.stages))
    actions = [action for slot in program.slots(STEPS_PER_ROUND) for action in slot.actions]

    def run() -> None:
        inputs, targets = ([*part.chunk(workers)] for part in batch)
        outputs: dict[int, torch.Tensor] = {}
        gradients: dict[int, torch.Tensor | None] = {}
        saved: dict[tuple[int, int], tuple[torch.Tensor, GradientEdge]] = {}
        for op, _, j, m, version, _, _, reads, _, frees in actions:
            if op is Op.UPDATE:
                old, new = (version - 1) % 2, version % 2
                if reads != frees:  # the version before is still read
                    torch._foreach_copy_(parameters[new][j], parameters[old][j])
                optimizers[old][j].step()
                optimizers[old][j].zero_grad()
            elif op is Op.FORWARD:
                read = outputs.pop(m).requires_grad_() if j else inputs[m % workers]
                output = copies[m // workers % 2][j](read)
                if j == last:
                    output = F.cross_entropy(output, targets[m % workers]) / workers
                saved[m, j] = read, get_gradient_edge(output)
                outputs[m], gradients[m] = output.detach(), None
            else:
                read, edge = saved.pop((m, j))
                torch.autograd.backward([edge], [gradients[m]])
                gradients[m] = read.grad

    return run


def _engine_loop(config: RunConfig, batch: tuple[torch.Tensor, torch.Tensor], traced_steps: int) -> Callable[[], None]:
    engine = Engine(
        cut_model(config).stages, F.cross_entropy, sgd, "cdp_v2", workers=config.workers, traced_steps=traced_steps
    )

    def run() -> None:
        for _ in engine.run([batch] * STEPS_PER_ROUND):
            pass

    return run


def _config(model: str, image_size: int, workers: int, batch_size: int, partition: str) -> RunConfig:
    classes = 10 if image_size == 32 else 1000
    return RunConfig(
        dataset=DatasetConfig("synthetic", channels=3, image_size=image_size, classes=classes),
        model=ModelConfig(model),
        workers=workers,
        batch_size=batch_size,
        partition=partition,
    )


# --- programs -----------------------------------------------------------------------------------------------------


def programs() -> dict[str, object]:
    """What a program costs a rank: to make and check it, and to shift an action of a later step.

    The start is what no rank can do without: choices to first slot, on one core. The cost of an action should not
    depend on the number of ranks; it is the mean over up to a hundred steps, of a rank that stands for all.
    """
    rows = [
        _program_row(mode, n, placement) for n in PROGRAM_WORKERS for mode in PROGRAM_MODES for placement in PLACEMENTS
    ]
    return {"config": "N = S, one core, no tensors", "rows": rows}


def _program_row(mode: str, workers: int, placement: str) -> dict[str, object]:
    begin = time.process_time()
    rank = RankProgram(Program(Schedule.build(mode, workers, placement=placement)), 0)
    next(rank.replay(0, lambda: True))
    started = time.process_time() - begin
    for steps in (5, max(5, min(100, MOST_FORWARDS // workers**2))):  # the first time, the rank picks its actions
        left = iter(range(steps))
        begin = time.process_time()
        actions = sum(len(slot.actions) for slot in rank.replay(0, lambda: next(left, None) is not None))  # noqa: B023
    each = (time.process_time() - begin) / actions
    row = {
        "mode": mode,
        "workers": workers,
        "placement": placement,
        "ranks": rank.schedule.ranks,
        "start_cpu_seconds": round(started, 3),
        "microseconds_per_action": round(1e6 * each, 2),
    }
    print(row, flush=True)
    return row


# --- tables -------------------------------------------------------------------------------------------------------


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
        bucket = speed.get("ddp_bucket_mib", {}).get(name)
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
    for curve in _link_curves():
        head = [f"{mode} / ddp | planned" for mode in LINK_MODES]
        first = f"| {curve['model']}: link [Mbit/s] | link time / compute time | bucket of ddp [MiB]"
        lines += ["", f"{first} | {' | '.join(head)} |"]
        lines.append("| --- | --- | --- |" + " --- | --- |" * len(LINK_MODES))
        for row in curve["rows"]:
            bucket = row.get("ddp_bucket_mib", DDPBaseline.bucket_cap_mb)  # older results are with torch's default
            cells = [row["rate_mbit"] or "unlimited", f"{row['link_seconds_over_compute']:.2f}", bucket]
            for mode in LINK_MODES:
                ratio = row["throughput_ratios"][mode]
                cells += [f"{ratio['median']:.2f} ({_quartiles(ratio)})"]
                cells += [f"{row['planned_ratios'][mode]:.2f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        rounds = f"{curve['rounds']} alternating rounds of {curve['steps_per_round']} training steps"
        lines += ["", f"{rounds}; {curve['config']}; {_evidence(curve)}."]
    return lines


def _link_curves() -> list[dict[str, Any]]:
    """Return what was measured over links, of each network."""
    paths = [RESULTS / f"{name}.json" for name in LINK_NETWORKS]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def draw_links(curves: Sequence[dict[str, Any]]) -> Figure:
    """Draw throughput over DistributedDataParallel's against link time over compute time, measured and planned."""
    figure = Figure(figsize=(4.2 * len(curves), 3.2), layout="constrained")
    for axis, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        rows = sorted(curve["rows"], key=lambda row: row["link_seconds_over_compute"])
        x = [row["link_seconds_over_compute"] for row in rows]
        for mode in LINK_MODES:
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


# --- placements ---------------------------------------------------------------------------------------------------

PEERS = {"pipeline": ("torch_1f1b", "torch_gpipe"), "replicated": ("ddp",), "zero": ("fsdp2",)}
PEER_ROUNDS = 8
PEER_STEPS = 6
DDP_BUCKETS = (1, 4, 25)
"""Bucket sizes in MiB that DDP is tried with; 25 is torch's default, with which most gradients of a small network can
leave only when the backward is done."""
TRIAL_ROUNDS, TRIAL_STEPS = 2, 2


def placements() -> dict[str, object]:
    """Throughput of cdp_v2 over torch's own data parallelism and pipelines, each on 2 processes with one thread, and as
    planned: the ratio of their prices."""
    config = _two_ranks("resnet18", 32, stages=2)
    blocks = [len(names) for names in cut_model(config).block_names]
    ratios: dict[str, dict[str, float]] = {}
    planned: dict[str, float] = {}
    buckets: dict[str, float] = {}
    network = measure_network()
    for placement, peers in PEERS.items():
        arguments = config, blocks, ("cdp_v2",), placement, peers, PEER_ROUNDS, PEER_STEPS
        seconds, bucket = launch(_alternating_rounds, arguments, config.workers)
        prices = _planned(config, blocks, network)
        for peer in peers:
            name = f"{placement} / {peer}"
            ratios[name] = _ratios(seconds, "cdp_v2", peer)
            buckets |= {name: bucket} if bucket else {}
            planned[name] = prices[f"dp {peer}"] / prices[f"cdp_v2 {placement}"]
            print(name, ratios[name], "planned", planned[name], flush=True)
    return {
        "config": _two_ranks_text(config, blocks, "gloo on loopback"),
        "rounds": PEER_ROUNDS,
        "steps_per_round": PEER_STEPS,
        "ddp_bucket_mib": buckets,
        "throughput_ratios": ratios,
        "planned_ratios": planned,
    }


def _two_ranks(model: str, image_size: int, stages: int) -> RunConfig:
    """Return what is trained on two ranks of one thread."""
    workers, micro_batch = 2, 16
    os.environ["OMP_NUM_THREADS"] = "1"
    return replace(_config(model, image_size, workers, workers * micro_batch, "time"), stages=stages)


def _two_ranks_text(config: RunConfig, blocks: list[int], network: str) -> str:
    return (
        f"{config.model.name}, {config.input_shape[1]} px, N = {config.workers}, S = {config.stage_count}, micro-batch "
        f"{config.batch_size // config.workers}, fp32, {network}, one thread a process, stages cut by measured time "
        f"into {blocks} blocks"
    )


def _ratios(seconds: dict[str, list[float]], mode: str, peer: str) -> dict[str, float]:
    """Return the spread of the throughput of a mode over a baseline's."""
    return ratio_spread(seconds[peer], seconds[mode])


def _planned(config: RunConfig, blocks: list[int], network: tuple[Link, Collectives]) -> dict[str, float]:
    """Return the seconds of a step that cdp-plan promises, by mode and place, from stages timed on this machine."""
    cut = cut_model(config, blocks)
    forward, backward = measure_stages(config, cut)
    link, collectives = network
    cluster = Cluster(forward, backward, within_host=link, devices_per_host=config.workers, collectives=collectives)
    (prices,) = prices_on_each(config, cut, (cluster,))
    return {name: price.step_seconds for name, price in prices.items()}


def _alternating_rounds(
    config: RunConfig,
    blocks: list[int],
    modes: tuple[str, ...],
    placement: str,
    peers: tuple[str, ...],
    rounds: int,
    steps: int,
) -> tuple[dict[str, list[float]], float | None]:
    """Train all contenders in turns, a few steps each, in the same ranks.

    Returns:
        The seconds of each round, and the MiB of a bucket of DDP with which it was fastest, if it is among the peers.
    """
    keep_freed_memory()
    with process_group(torch.device("cpu"), config.workers, 600):
        torch.manual_seed(0)
        size = config.batch_size
        batch = torch.randn(size, *config.input_shape), torch.randint(0, 10, (size,))

        def stages() -> list[torch.nn.Module]:
            return list(cut_model(config, blocks).stages)

        def peer(name: str, bucket: float = DDPBaseline.bucket_cap_mb) -> Baseline:
            kind = type("DDP", (DDPBaseline,), {"bucket_cap_mb": bucket}) if name == "ddp" else baseline_class(name)
            return kind(stages(), F.cross_entropy, sgd, workers=config.workers)

        bucket = None
        if "ddp" in peers:
            trials = {each: partial(steady_step_seconds, peer("ddp", each), batch, TRIAL_STEPS) for each in DDP_BUCKETS}
            bucket = fastest_of(trials, TRIAL_ROUNDS)
        contenders: dict[str, Engine | Baseline] = {
            **{mode: Engine(stages(), F.cross_entropy, sgd, mode, placement, workers=config.workers) for mode in modes},
            **{name: peer(name, bucket) if bucket else peer(name) for name in peers},
        }
        timed = {name: partial(steady_step_seconds, each, batch, steps) for name, each in contenders.items()}
        return alternating_rounds(timed, rounds), bucket


# --- links --------------------------------------------------------------------------------------------------------

LINK_NETWORKS = {"links_resnet18": ("resnet18", 32, 6), "links_vit": ("vit_tiny_patch16_224", 64, 8)}
"""By bench: network, pixels and stages. Most parameters of the first are in two of ten blocks; the second's are equal.
"""
LINK_MODES = ("cdp_v1", "cdp_v2")
RATES_MBIT = (100, 250, 500, 1000, 1500, 2000, None)
LINK_ROUNDS, LINK_STEPS = 3, 6


def links(name: str) -> dict[str, object]:
    """Throughput of CDP over DistributedDataParallel, replicated on two hosts, over the rate of their link."""
    config = _two_ranks(*LINK_NETWORKS[name])
    blocks = [len(names) for names in cut_model(config).block_names]
    return {
        "rounds": LINK_ROUNDS,
        "steps_per_round": LINK_STEPS,
        "model": config.model.name,
        "config": _two_ranks_text(config, blocks, "gloo between two network namespaces, rate limited by tbf"),
        "rows": [_over_link(name, config, blocks, rate) for rate in RATES_MBIT],
    }


def _over_link(name: str, config: RunConfig, blocks: list[int], rate_mbit: int | None) -> dict[str, object]:
    """Measure one point of the curves."""
    measured = _across_hosts(name, blocks, rate_mbit)
    link, collectives = network_of(measured["messages"])
    prices = _planned(config, blocks, (link, collectives))
    gradient_bytes = sum(cut_model(config, blocks).costs.gradient_bytes)
    row = {
        "rate_mbit": rate_mbit,
        "measured_mbit": 8e-6 * link.bandwidth_bytes_per_second,
        "ddp_bucket_mib": measured["ddp_bucket_mib"],
        "link_seconds_over_compute": link.seconds(gradient_bytes) / prices["cdp_v2 single_device"] * config.workers,
        "throughput_ratios": {mode: _ratios(measured["seconds"], mode, "ddp") for mode in LINK_MODES},
        "planned_ratios": {mode: prices["dp ddp"] / prices[f"{mode} replicated"] for mode in LINK_MODES},
    }
    print(config.model.name, row, flush=True)
    return row


def _across_hosts(name: str, blocks: list[int], rate_mbit: int | None) -> dict[str, Any]:
    """Return what `_link_rank` has written on two hosts joined by a cable of a rate."""
    with two_hosts(rate_mbit) as hosts, TemporaryDirectory() as folder:
        meeting = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": str(len(hosts))}
        arguments = [name, json.dumps(blocks), f"{folder}/seconds.json"]
        ranks = [
            subprocess.Popen(
                host.command(sys.executable, __file__, "link-rank", *arguments),
                env={**os.environ, **meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate(hosts)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"a rank failed at {rate_mbit} Mbit/s; its error stands above")
        found: dict[str, Any] = json.loads(Path(folder, "seconds.json").read_text())
        return found


def _link_rank(name: str, blocks: list[int], path: Path) -> None:
    """Be one of the two ranks of `links`."""
    config = _two_ranks(*LINK_NETWORKS[name])
    messages = time_messages(3)
    os.environ["MASTER_PORT"] = "29501"  # else a rank could meet the other at the store that is just closing
    seconds, bucket = _alternating_rounds(config, blocks, LINK_MODES, "replicated", ("ddp",), LINK_ROUNDS, LINK_STEPS)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps({"messages": messages, "seconds": seconds, "ddp_bucket_mib": bucket}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["link-rank"]:
        _link_rank(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(run_script(__doc__, main, sys.argv[1:]))
