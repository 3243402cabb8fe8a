"""`estimate`: the price of a job of any size, from three smaller jobs if it is too large to simulate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing.cluster import Cluster, Link
from cdp_repro.predict.pricing.self_timed import Price, price_on_each
from cdp_repro.schedule import Program, Schedule, Spec

N = TypeVar("N", int, float)

SIMULATED_FORWARDS = 1024
"""Jobs of up to this many forwards in a training step (M S) are simulated, in about a second; others extrapolated."""


def _program(job: Spec, costs: StageCosts) -> Program:
    return Program(Schedule.from_spec(job, costs.gradient_bytes))


def estimate(
    job: Spec,
    costs: StageCosts,
    clusters: Sequence[Cluster],
    optimizer_states: Sequence[float] = (),
    simulated: int = SIMULATED_FORWARDS,
) -> list[Price]:
    """Return the price of a job of any size on each of several clusters, which have hosts of one size.

    A job of up to `simulated` forwards a step is simulated, a larger one extrapolated. A second cluster hardly takes
    longer than one: it shares the programs and only needs its own clock.

    The number of replicas R is extrapolated first, with the stages unchanged; then the number of workers N, with S/N
    unchanged. Each is extrapolated from three simulated jobs, with 2n, 3n and 4n of it. How exact this is:

    - Devices and bytes are polynomials of degree 2 in N and in R, which three points determine. They are exact for
      equal stages if N R and n are multiples of `devices_per_host` (of twice as many, if micro-batches pass the ranks
      both ways), which holds for n up to 8. Larger hosts count as n devices, with too many borders between them. On
      `model_parallel` they are not exact: hosts and stages never align, and the large job is given the same shares of
      links as the small one.
    - Seconds are a maximum of such terms. The terms are linear, except where one micro-batch runs at a time, for data
      parallelism on `zero`, where the owner of a stage serves all others, for parameter servers, each of which serves
      all workers, and for collectives, whose rings grow with the number of ranks. The last points determine the largest
      term there. It is exact unless another term overtakes it later; then `step_seconds` is too low. So two more are
      extrapolated from the same job with free links and with free compute, where terms compete less: the step is taken
      to last at least the longer and at most the sum of the two. Where steps differ, these estimates are of means, and
      can miss on either side.
    - A job of fewer workers has fewer stages, each the mean of its share of the stages. This is exact for equal stages,
      and for sums over all stages; with unequal ones both bounds can be missed by some percent, and where the sizes of
      stages vary ninefold by a tenth and more, as bytes can be, above all those between hosts. No estimate is below
      the compute time of the mean device, or of the busiest device of a pipeline.
    """
    sizes = {cluster.devices_per_host for cluster in clusters}
    if len(sizes) > 1:
        raise ValueError(f"the clusters have hosts of {sorted(sizes)} devices: give clusters with hosts of one size")
    if not is_extrapolated(job, clusters[0], simulated):
        return price_on_each(_program(job, costs), costs, clusters, optimizer_states)
    prices = iter(_extrapolated(job, costs, [*chain.from_iterable(map(_free, clusters))], optimizer_states, simulated))
    found = []
    for estimated, *alone in zip(prices, prices, prices, strict=True):
        seconds = [each.step_seconds for each in alone]
        least = max(estimated.step_seconds, *seconds)
        found.append(replace(estimated, step_seconds=least, at_most_seconds=max(least, sum(seconds))))
    return found


def _free(cluster: Cluster) -> tuple[Cluster, Cluster, Cluster]:
    """Return the cluster unchanged, with links that take no time, and with compute that takes no time."""
    nothing = (0.0,) * cluster.stages
    return (
        cluster,
        replace(cluster, within_host=Link(), between_hosts=Link()),
        replace(cluster, forward_seconds=nothing, backward_seconds=nothing, update_seconds=nothing),
    )


def _axis(job: Spec, cluster: Cluster) -> str:
    """Return the number that is extrapolated first: `replicas` or `workers`."""
    return "replicas" if job.replicas > 4 * _unit(cluster, "replicas", job) else "workers"


def is_extrapolated(job: Spec, cluster: Cluster, simulated: int = SIMULATED_FORWARDS) -> bool:
    """Whether `estimate` extrapolates: the job has more than `simulated` forwards a step, and smaller jobs exist."""
    axis = _axis(job, cluster)
    unit = _unit(cluster, axis, job)
    has_smaller = getattr(job, axis) > 4 * unit
    if axis == "workers":  # whose stages and ranks are whole numbers, and with which the micro-batches become fewer
        has_smaller &= not any(unit * number % job.workers for number in (job.stages, job.ranks or 0))
        has_smaller &= job.micro_batches is None and not job.speeds and not job.sources  # which name each of them
        has_smaller &= job.jitter is None  # which draws other times for fewer
    forwards = job.sizes.micro_batches * job.stages
    return forwards > simulated and has_smaller and (axis == "replicas" or isinstance(job.mode, str))


def _extrapolated(
    job: Spec, costs: StageCosts, clusters: Sequence[Cluster], optimizer_states: Sequence[float], simulated: int
) -> list[Price]:
    """Return the price, without bounds, on each of several clusters that only differ in seconds."""
    hosts = clusters[0]
    if not is_extrapolated(job, hosts, simulated):
        return price_on_each(_program(job, costs), costs, clusters, optimizer_states)
    axis = _axis(job, hosts)
    unit = _unit(hosts, axis, job)
    growth = unit * job.replicas if axis == "workers" else unit
    at_least = [_busiest_rank_seconds(job, cluster) for cluster in clusters]
    if growth % _aligned(job, hosts) and job.workers * job.replicas > hosts.devices_per_host:
        clusters = [replace(cluster, devices_per_host=growth // _directions(job)) for cluster in clusters]
    small, slots = [], []
    for units in (2, 3, 4):
        resized = _resized(job, axis, units, unit, costs, clusters)
        shrunk = _differences(_sums_to(optimizer_states, resized[0].stages)) if optimizer_states else ()
        small.append(_extrapolated(*resized, shrunk, simulated))
        slots.append(Schedule.from_spec(resized[0]).timeline.period)
    is_quadratic = slots[2] - slots[1] != slots[1] - slots[0] or _one_serves_all(job, axis)
    return [
        _from_three(job, axis, getattr(job, axis) / unit, prices, least, is_quadratic)
        for prices, least in zip(zip(*small, strict=True), at_least, strict=True)
    ]


def _one_serves_all(job: Spec, axis: str) -> bool:
    """Whether the work of a rank, or of a ring, grows with the number of workers as well as with their stages."""
    is_together = job.chosen_mode.timeline_class.is_simultaneous
    is_served = job.placement == "parameter_server" or (is_together and job.placement == "zero")
    return axis == "workers" and (is_served or job.collectives)


def _from_three(
    job: Spec, axis: str, size: float, prices: Sequence[Price], at_least: float, is_quadratic: bool
) -> Price:
    """Return the price at `size` from those at 2, 3 and 4; its seconds are at least `at_least`."""
    names = ("devices", "busy_seconds", "within_host_bytes", "between_hosts_bytes", "activation_bytes")
    found = {name: _through([getattr(each, name) for each in prices], size) for name in names}
    if job.placement == "model_parallel":
        sent = found["within_host_bytes"] + found["between_hosts_bytes"]
        found["between_hosts_bytes"] = sent * prices[-1].between_hosts_share
        found["within_host_bytes"] = sent - found["between_hosts_bytes"]
    found["state_bytes"] = _state_bytes(job, axis, size, [each.state_bytes for each in prices])
    two, three, four = seconds = [each.step_seconds for each in prices]
    if job.collectives and axis == "replicas":  # 1 - 1/R of the bytes: a polynomial once multiplied by R
        grown = _through([2 * two, 3 * three, 4 * four], size) / size
    else:
        grown = _through(seconds, size) if is_quadratic else four + (four - three) * (size - 4)
    step_seconds = max(at_least, found["busy_seconds"] / found["devices"], grown)
    found["devices"] = round(found["devices"])
    return Price(**found, step_seconds=step_seconds, method="extrapolated")  # type: ignore[arg-type]


def _state_bytes(job: Spec, axis: str, size: float, found: Sequence[float]) -> float:
    """Return the bytes of the state of the device with most, from those `found` at the sizes 2, 3 and 4."""
    least, _, most = found
    if job.placement == "zero" and axis == "replicas":
        if job.collectives:
            return 4 * most / size  # shards of the same stages
        smallest = replace(job, replicas=round(2 * job.replicas / size))
        return least * _most_stages_held(job) / _most_stages_held(smallest)  # more owners of the same stages
    if job.chosen_mode.has_own_clocks:  # servers keep a version for each worker, of as many more stages
        return _through(found, size)
    return least + (most - least) / 2 * (size - 2)  # versions come in whole numbers


def _most_stages_held(job: Spec) -> int:
    """Return the number of stages that the rank with most holds."""
    placement = Schedule.from_spec(job).placement
    return max(Counter(rank for stage in range(job.stages) for rank in placement.holders(stage)).values())


def _unit(cluster: Cluster, axis: str, job: Spec) -> int:
    """Return n, such that hosts are full if few devices suffice for that."""
    shared = math.gcd(cluster.devices_per_host, job.replicas) if axis == "workers" else 1
    least = 2 if axis == "workers" and job.replicas > 1 else 4
    return min(8 * _directions(job), math.lcm(least, _aligned(job, cluster) // shared))


def _aligned(job: Spec, cluster: Cluster) -> int:
    """Return the number of devices after which the borders of hosts are at the same places of a pipeline.

    Where it runs both ways, the two ranks of a stage are as far from its middle, which has to be a border, too.
    """
    return cluster.devices_per_host * _directions(job)


def _directions(job: Spec) -> int:
    """Return 2 if micro-batches pass the ranks both ways, else 1."""
    return 1 + (job.chosen_mode.timeline_class.layout == "both_ways")


def _busiest_rank_seconds(job: Spec, cluster: Cluster) -> float:
    """Return the compute seconds of the busiest rank of a pipeline in a training step; 0 for other placements."""
    if job.placement != "pipeline":
        return 0.0
    schedule = Schedule.from_spec(job)
    seconds = [0.0] * schedule.ranks
    for stage in range(job.stages):
        holders = schedule.placement.holders(stage)  # which take turns
        computes = cluster.forward_seconds[stage] + cluster.backward_seconds[stage]
        for rank in holders:
            seconds[rank] += schedule.micro_batches / len(holders) * computes + cluster.update_seconds[stage]
    return max(seconds)


def _resized(
    job: Spec, axis: str, units: int, unit: int, costs: StageCosts, clusters: Sequence[Cluster]
) -> tuple[Spec, StageCosts, Sequence[Cluster]]:
    """Return the same job with `units` times `unit` replicas or workers.

    With fewer workers, each stage is the mean of its share, and servers are fewer if as many workers share each.
    """
    size = units * unit
    if axis == "replicas":
        return replace(job, replicas=size), costs, clusters
    stages = size * job.stages // job.workers
    smaller = StageCosts(**{name: _shrunk(values, stages) for name, values in vars(costs).items()})
    resized = [
        replace(
            cluster,
            forward_seconds=_differences(_sums_to(cluster.forward_seconds, stages)),
            backward_seconds=_differences(_sums_to(cluster.backward_seconds, stages)),
            update_seconds=_differences(_sums_to(cluster.update_seconds, stages)),
        )
        for cluster in clusters
    ]
    ranks = None if job.ranks is None else size * job.ranks // job.workers
    servers = job.servers
    if servers is not None and not unit * servers % job.workers:
        servers = size * servers // job.workers
    return replace(job, workers=size, stages=stages, ranks=ranks, servers=servers), smaller, resized


def _shrunk(values: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Return costs as the means of `number` equal shares, in whole numbers; flags by majority."""
    sums = _sums_to(values, number)
    if isinstance(values[0], bool):
        return tuple(mean > 0.5 for mean in _differences(sums))
    return _differences(map(round, sums))


def _differences(sums: Iterable[N]) -> tuple[N, ...]:
    """Return the differences of successive sums: the inverse of `accumulate`."""
    return tuple(later - earlier for earlier, later in pairwise(chain((0,), sums)))


def _sums_to(values: Sequence[float], number: int) -> list[float]:
    """Cut `values` into `number` equal shares, inside values if necessary; return the cumulative sums of their means.

    So sums over all stages are proportional to the number of stages, as extrapolation requires.
    """
    sums = [0.0, *accumulate(values)]
    share = len(values) / number
    found = []
    for end in range(1, number + 1):
        whole, rest = divmod(end * len(values), number)
        found.append((sums[whole] + (values[whole] * rest / number if rest else 0.0)) / share)
    return found


def _through(values: Sequence[float], at: float) -> float:
    """Return the value at `at` of the polynomial of degree 2 through `values` at 2, 3 and 4."""
    two, three, four = values
    return two * (at - 3) * (at - 4) / 2 - three * (at - 2) * (at - 4) + four * (at - 2) * (at - 3) / 2
