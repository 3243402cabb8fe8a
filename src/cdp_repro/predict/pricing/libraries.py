"""The price of data parallelism by two libraries: their published schedules on one rank, because all are alike."""

from __future__ import annotations

from collections.abc import Sequence

from cdp_repro.predict.costs import StageCosts
from cdp_repro.predict.pricing.cluster import Cluster, ring_seconds
from cdp_repro.predict.pricing.self_timed import Price


def _data_parallel_price(
    costs: StageCosts, cluster: Cluster, devices: int, seconds: float, ring_bytes: float, state: float, update: float
) -> Price:
    """Return the price of a data-parallel step of `seconds`, in which `ring_bytes` go round the ring."""
    total = ring_bytes * (devices - 1)
    hosts = -(-devices // cluster.devices_per_host)
    crossing = total * hosts / devices if hosts > 1 else 0.0  # a ring leaves each host once
    compute = sum(cluster.forward_seconds) + sum(cluster.backward_seconds)
    peak = sum(costs.forward_bytes)
    return Price(devices, seconds, devices * (compute + update), total - crossing, crossing, peak, state, "closed form")


def _state_bytes(costs: StageCosts, optimizer_states: Sequence[float]) -> float:
    """Return the bytes of all parameters, and of what is kept beside them; see `price`."""
    states = optimizer_states or [0] * costs.stages
    return sum((1 + each) * size for each, size in zip(states, costs.parameter_bytes, strict=True))


BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of buckets that a stage's gradients may be in, as a price tries them."""


def price_ddp(costs: StageCosts, cluster: Cluster, devices: int, optimizer_states: Sequence[float] = ()) -> Price:
    """Return the price of DistributedDataParallel with the best size of its buckets (Li et al. 2020, VLDB 13(12)).

    Each bucket's all-reduce, 2(D-1)/D of its bytes, starts when its backward and the bucket before are done. The
    optimizer runs after the last one. Each device has one micro-batch. A stage is in one of the numbers `BUCKETS` of
    equal parts: more of them can leave during its backward, and each costs a latency.
    """
    update = sum(cluster.update_seconds)
    state = _state_bytes(costs, optimizer_states)
    seconds = min(_reduced_after(costs, cluster, devices, buckets) for buckets in BUCKETS) + update
    return _data_parallel_price(costs, cluster, devices, seconds, 2 * sum(costs.gradient_bytes), state, update)


def _reduced_after(costs: StageCosts, cluster: Cluster, devices: int, buckets: int) -> float:
    """Return the seconds from the start of a step to the last all-reduce, with so many buckets a stage."""
    computed, reduced = sum(cluster.forward_seconds), 0.0
    for stage in reversed(range(costs.stages)):
        ring = 2 * ring_seconds(cluster, devices, costs.gradient_bytes[stage] / buckets)
        for _ in range(buckets):
            computed += cluster.backward_seconds[stage] / buckets
            reduced = max(reduced, computed) + cluster.collectives.all_reduce * ring
    return max(computed, reduced)


def price_fsdp2(costs: StageCosts, cluster: Cluster, devices: int, optimizer_states: Sequence[float] = ()) -> Price:
    """Return the price of FSDP2 with one unit per stage, resharded after its forward (Zhao et al. 2023, VLDB 16(12)).

    Every device updates its shard, which is its state: stages that are whole for a while do not count, as those that
    are lent do not on `zero`.
    """
    factors = cluster.collectives
    gather = [factors.all_gather * ring_seconds(cluster, devices, size) for size in costs.parameter_bytes]
    scatter = [factors.reduce_scatter * ring_seconds(cluster, devices, size) for size in costs.gradient_bytes]
    update = sum(cluster.update_seconds) / devices
    if factors.on_streams:
        seconds = _beside_compute(cluster, gather, scatter)
    else:
        seconds = sum(cluster.forward_seconds) + sum(cluster.backward_seconds) + 2 * sum(gather) + sum(scatter)
    state = _state_bytes(costs, optimizer_states) / devices
    ring_bytes = 2 * sum(costs.parameter_bytes) + sum(costs.gradient_bytes)
    return _data_parallel_price(costs, cluster, devices, seconds + update, ring_bytes, state, update)


def _beside_compute(cluster: Cluster, gather: Sequence[float], scatter: Sequence[float]) -> float:
    """Return the seconds of all forwards and backwards, with collectives beside them in the order of issue.

    The parameters of the next stage to compute are gathered when a stage starts; its gradients are reduced and
    scattered when its backward ends.
    """
    stages = range(cluster.stages)
    passes = [(stage, cluster.forward_seconds[stage], 0.0) for stage in stages]
    passes += [(stage, cluster.backward_seconds[stage], scatter[stage]) for stage in reversed(stages)]
    computed, linked = 0.0, gather[0]
    ready = linked
    for (stage, seconds, scattered), following in zip(passes, [*passes[1:], None], strict=True):
        begun = max(computed, ready)
        computed = begun + seconds
        if following:  # the last stage is freed before it is gathered again
            issued = computed if following[0] == stage else begun
            ready = linked = max(linked, issued) + gather[following[0]]
        if scattered:
            linked = max(linked, computed) + scattered
    return max(computed, linked)
