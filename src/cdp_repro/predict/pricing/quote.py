"""A quote: the prices of several ways to train one model on one cluster (`cdp-plan price=true`).

It prices `dp`, `cdp_v1`, `cdp_v2` and the mode of the run on every placement that can run them with these sizes,
`accumulation` on one device, and the baselines. If the mode of the run cuts sequences into slices, it is priced alone.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from cdp_repro.config import RunConfig
from cdp_repro.observe.atomic_file import replacing
from cdp_repro.observe.text import format_bytes, table
from cdp_repro.predict.pricing import (
    Cluster,
    Collectives,
    Link,
    Price,
    estimate,
    is_extrapolated,
    price_ddp,
    price_fsdp2,
)
from cdp_repro.predict.remembered_cuts import stage_cut
from cdp_repro.predict.stage_cut import StageCut
from cdp_repro.predict.training_state import optimizer_states, reads_ahead
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS, PLACEMENTS, Schedule, ScheduleError, Spec

PRICED_MODES = ("dp", "cdp_v1", "cdp_v2", "accumulation")
"""Priced beside the mode of the run, unless that cuts sequences into slices; `accumulation` on one device only."""

_FACTORS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
"""Multiples of the bandwidth in the figure."""


@dataclass(frozen=True)
class Quote:
    """The prices of one model on one cluster."""

    config: RunConfig
    cut: StageCut
    cluster: Cluster
    prices: Mapping[str, Price]
    """By mode and placement or baseline, e.g. "cdp_v2 pipeline" or "dp ddp"."""
    processes: int = 1
    """Number of processes that make a quote."""


def make_quote(config: RunConfig, processes: int = 1) -> Quote:
    """Price a training step of the model of `config` in all ways of a quote; needs no data.

    If there is much to simulate, use `processes` processes.

    Raises:
        ConfigError, ModelError, ScheduleError: as the run itself would.
    """
    cut = stage_cut(config)
    cluster = cluster_of(config, cut)
    (prices,) = prices_on_each(config, cut, (cluster,), processes)
    return Quote(config, cut, cluster, prices, processes)


def cluster_of(config: RunConfig, cut: StageCut) -> Cluster:
    """Return the cluster that `config.cluster` describes, measured on this machine if it says so."""
    given, costs = config.cluster, cut.costs
    within, collectives = Link(given.latency_seconds, given.bandwidth_bytes_per_second), Collectives()
    if given.calibrate:
        from cdp_repro.predict.cutting import cut_model  # here: torch takes seconds
        from cdp_repro.predict.pricing.calibration import measure_network, measure_stages

        within, collectives = measure_network()
        forward, backward = measure_stages(config, cut_model(config, cut.blocks_per_stage))
    elif given.forward_seconds is not None:
        forward = tuple(given.forward_seconds)
        backward = tuple(given.backward_seconds or (2 * seconds for seconds in forward))
    else:
        assert given.flops_per_second is not None, "checked with the configuration"
        forward = tuple(flops / given.flops_per_second for flops in costs.forward_flops)
        backward = tuple(flops / given.flops_per_second for flops in costs.backward_flops)
    latency, bandwidth = given.between_hosts_latency_seconds, given.between_hosts_bandwidth_bytes_per_second
    between = Link(
        within.latency_seconds if latency is None else latency,
        within.bandwidth_bytes_per_second if bandwidth is None else bandwidth,
    )
    update = tuple(given.update_seconds or ())
    return Cluster(forward, backward, update, within, between, given.devices_per_host, collectives)


def prices_on_each(
    config: RunConfig, cut: StageCut, clusters: Sequence[Cluster], processes: int = 1
) -> list[dict[str, Price]]:
    """Return, for each cluster, the prices of those modes, placements and baselines of a quote that fit the sizes.

    All clusters must have hosts of the same size. Several clusters hardly take longer than one.
    """
    jobs = _jobs(config)
    different = [job for number, job in enumerate(jobs.values()) if job not in [*jobs.values()][:number]]
    run = partial(_estimate, config=config, cut=cut, clusters=clusters)
    if processes > 1 and any(is_extrapolated(job, clusters[0]) for job in different):
        with ProcessPoolExecutor(processes, mp_context=get_context("forkserver")) as pool:
            estimates = [*pool.map(run, different)]
    else:
        estimates = [*map(run, different)]
    by_name = {name: estimates[different.index(job)] for name, job in jobs.items()}
    found = [{name: prices[number] for name, prices in by_name.items() if prices} for number in range(len(clusters))]
    devices = config.workers * config.accumulate * config.replicas
    # closed forms only cover chains, and workers of one speed, with k micro-batches each, of whole sequences
    others = config.branches, config.speeds, config.micro_batches, config.slices_of_a_sequence > 1
    if devices > 1 and not any(others):
        states = optimizer_states(config, cut, config.schedule().data_parallel())
        for prices, cluster in zip(found, clusters, strict=True):
            prices["dp ddp"] = price_ddp(cut.costs, cluster, devices, states)
            prices["dp fsdp2"] = price_fsdp2(cut.costs, cluster, devices, states)
    return found


def _estimate(job: Spec, config: RunConfig, cut: StageCut, clusters: Sequence[Cluster]) -> list[Price]:
    """Return the price of a job on each cluster; none for a mode that cannot run on a placement of another package."""
    try:
        return estimate(job, cut.costs, clusters, optimizer_states(config, cut, Schedule.from_spec(job)))
    except ScheduleError:
        if job == config.spec():
            raise
        return []


def _jobs(config: RunConfig) -> dict[str, Spec]:
    """Return the jobs to simulate, by name."""
    chosen = config.spec()
    beside = PRICED_MODES if config.slices_of_a_sequence == 1 else ()  # slices have other costs
    rules = {**{name: name for name in beside}, config.mode.name: chosen.mode}
    jobs = {
        f"{mode} {place}": _job(chosen, rule, place)
        for mode, rule in rules.items()
        for place in PLACEMENTS
        if place == "single_device" or mode != "accumulation"
    }
    if (
        beside
        and not config.micro_batches
        and config.replicas == config.accumulate == 1
        and config.stage_count == config.workers
        and not config.branches
    ):
        chosen = replace(chosen, ranks=None)
        jobs["dp torch_gpipe"] = replace(_job(chosen, "dp", "pipeline"), pipeline_schedule="gpipe")
        jobs["dp torch_1f1b"] = replace(_job(chosen, "dp", "pipeline"), pipeline_schedule="one_f_one_b")
    return {name: job for name, job in jobs.items() if _can_run(job) and _is_as_fast(job, chosen)}


def _is_as_fast(job: Spec, chosen: Spec) -> bool:
    """Whether a job computes on workers of the chosen speeds, which not every mode knows; one device has one speed."""
    return job.speeds == chosen.speeds or job.placement == "single_device"


def _can_run(job: Spec) -> bool:
    """Whether the sizes fit: sizes of data parallelism on a pipeline need not fit the cyclic timeline."""
    try:
        Schedule.from_spec(job)
    except ValueError:
        return False
    return True


def _job(chosen: Spec, mode: str | tuple[tuple[int, ...], ...], placement: str) -> Spec:
    job = chosen.on(placement).in_mode(mode)
    can_be_by_library = job.chosen_mode.timeline_class.is_simultaneous and placement in COLLECTIVE_PLACEMENTS
    return replace(job, collectives=chosen.collectives and can_be_by_library)


def quote_text(quote: Quote) -> str:
    """Return the cluster and a row for each price as text."""
    config, cluster = quote.config, quote.cluster
    seconds = zip(cluster.forward_seconds, cluster.backward_seconds, strict=True)
    head = [
        f"{config.model.name}, {config.task.shape_text(config.input_shape)}, "
        f"{config.stage_count} stages, mini-batch {config.batch_size} = {config.sample_parts} x "
        f"{config.micro_batch_shape[0]}",
        f"stages, forward + backward [s]: {', '.join(f'{f:.4g} + {b:.4g}' for f, b in seconds)}",
        f"links: {_link_text(cluster.within_host)} within a host of {cluster.devices_per_host}, "
        f"{_link_text(cluster.between_hosts)} between hosts, for each device in each direction",
    ]
    if cluster.collectives != Collectives():
        factors = ", ".join(
            f"{name.replace('_', '-')} {getattr(cluster.collectives, name):.3g}"
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        )
        head.append(f"the library's collectives, over a ring on these links: {factors}")
    columns = (
        "mode", "where", "devices", "step [s]", f"{config.task.unit}/s", "idle", "activations/device",
        "parameters+optimizer/device", "sent/device", "between hosts", "by",
    )  # fmt: skip
    micro_batch = config.micro_batch_shape[0] * config.task.units(config.micro_batch_shape[1:])
    micro_batches = dict.fromkeys(quote.prices, config.workers * config.accumulate * config.replicas)
    micro_batches |= {name: job.sizes.micro_batches for name, job in _jobs(config).items()}
    rows = [columns, *(_row(name, each, micro_batches[name] * micro_batch) for name, each in quote.prices.items())]
    notes = "one training step; activations, parameters+optimizer: the device with most; sent: the mean device"
    if any(price.at_most_seconds for price in quote.prices.values()):
        notes += (
            "\na .. b: extrapolated from smaller jobs; the true seconds can lie somewhat outside, and of very unequal "
            "stages bytes can be off, too"
        )
    if (library := quote.prices.get("dp ddp")) and library.devices > config.workers * config.replicas:
        notes += (
            f"\nddp and fsdp2 have a device for each of the {library.devices} micro-batches, as they accumulate nothing"
        )
    if config.speeds:
        notes += f"\nspeeds={config.speeds}: only modes that know them are priced on several devices"
    if reads_ahead(config, config.schedule()):
        notes += (
            f"\ndelay={config.delay.name}: with the last steps that it keeps, without the copies that stale reads see, "
            "which cdp-plan tells without price=true"
        )
    return "\n".join(head) + f"\n\n{table(rows)}\n{notes}\n"


def _link_text(link: Link) -> str:
    return f"{link.latency_seconds * 1e6:.4g} us and {link.bandwidth_bytes_per_second:.4g} bytes/s"


def _row(name: str, price: Price, units: int) -> tuple[str, ...]:
    mode, place = name.split()
    return (
        mode,
        place,
        str(price.devices),
        f"{price.step_seconds:.4g}" + (f" .. {price.at_most_seconds:.4g}" if price.at_most_seconds else ""),
        f"{units / price.step_seconds:.4g}" if price.step_seconds else "-",
        f"{100 * price.idle_share:.1f} %",
        format_bytes(price.activation_bytes),
        format_bytes(price.state_bytes),
        format_bytes(price.sent_bytes_per_device),
        f"{100 * price.between_hosts_share:.0f} %",
        price.method,
    )


def write_quote(quote: Quote, folder: Path) -> list[Path]:
    """Write the prices as CSV, and step time against the bandwidths as SVG and PNG."""
    from cdp_repro.observe.figures import price_figure, save_figure

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "prices.csv", folder / "prices.svg", folder / "prices.png"]
    with replacing(written[0]) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mode", "where", *asdict(next(iter(quote.prices.values()))), "idle_share"])
        for name, price in quote.prices.items():
            writer.writerow([*name.split(), *asdict(price).values(), price.idle_share])
    title = f"{quote.config.model.name}, {quote.config.workers} workers, {quote.config.stage_count} stages"
    figure = price_figure(_curves(quote), title)
    for path in written[1:]:
        save_figure(figure, path)
    return written


def _curves(quote: Quote) -> dict[str, dict[float, float]]:
    """Return, by name of a job that sends anything, the seconds of a step at multiples of the bandwidths."""
    given = quote.cluster
    clusters = [
        replace(given, within_host=given.within_host.faster(factor), between_hosts=given.between_hosts.faster(factor))
        for factor in _FACTORS
    ]
    on_each = prices_on_each(quote.config, quote.cut, clusters, quote.processes)
    return {
        name: {factor: prices[name].step_seconds for factor, prices in zip(_FACTORS, on_each, strict=True)}
        for name, price in quote.prices.items()
        if price.sent_bytes_per_device
    }
