"""A cluster in numbers: seconds of stages, links, and collectives over them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """One direction of a device's connection."""

    latency_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.latency_seconds < math.inf and self.bandwidth_bytes_per_second > 0):
            raise ValueError(
                f"a link of latency_seconds={self.latency_seconds} and "
                f"bandwidth_bytes_per_second={self.bandwidth_bytes_per_second}: use 0 or more, and more than 0, "
                "e.g. 1e-5 and 1e10"
            )

    def seconds(self, size: float) -> float:
        """Return the seconds for which `size` bytes occupy the link."""
        return size / self.bandwidth_bytes_per_second

    def faster(self, factor: float) -> Link:
        """Return a link of the same latency and a multiple of the bandwidth."""
        return replace(self, bandwidth_bytes_per_second=factor * self.bandwidth_bytes_per_second)


@dataclass(frozen=True)
class Collectives:
    """Time of the libraries' collectives, relative to a ring over the same links; 1 is as fast as the ring."""

    all_reduce: float = 1.0
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    on_streams: bool = True
    """Whether collectives have their own streams, as on GPUs. FSDP2 relies on these; without, it waits for each."""


@dataclass(frozen=True)
class Cluster:
    """The seconds of each stage on one micro-batch, and the links. Tuples have one entry a stage.

    Devices 0..D-1 are on host 0, the next D on host 1, and so on. Every device has two links of its own: to devices on
    its host and to devices on others. On each it sends and receives at the same time, one message after the other.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...] = ()
    """Seconds of one update of the whole stage; default 0."""
    within_host: Link = Link()
    between_hosts: Link = Link()
    devices_per_host: int = 1
    collectives: Collectives = Collectives()

    def __post_init__(self) -> None:
        if not self.update_seconds:
            object.__setattr__(self, "update_seconds", (0.0,) * self.stages)
        times = (self.forward_seconds, self.backward_seconds, self.update_seconds)
        if len({len(each) for each in times}) != 1:
            raise ValueError(f"forward, backward and update need one time a stage; got {[len(each) for each in times]}")
        if not all(0 <= seconds < math.inf for each in times for seconds in each):
            raise ValueError("every stage needs a finite number of seconds, 0 or more, e.g. 0.01")
        if self.devices_per_host < 1:
            raise ValueError(f"devices_per_host={self.devices_per_host}: use 1 or more")

    @classmethod
    def equal(cls, stages: int, forward: float = 1.0, backward: float = 1.0, update: float = 0.0) -> Cluster:
        """Return a cluster on which all stages take the same seconds, and messages none."""
        return cls((forward,) * stages, (backward,) * stages, (update,) * stages)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_seconds)

    def crosses(self, source: int, destination: int) -> bool:
        """Whether the two ranks are on different hosts."""
        return source // self.devices_per_host != destination // self.devices_per_host

    def link(self, crosses: bool) -> Link:
        """Return a link within a host or between two."""
        return self.between_hosts if crosses else self.within_host


def ring_seconds(cluster: Cluster, devices: int, size: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `size` bytes in a ring (Patarasuk and Yuan 2009).

    In D-1 rounds, each device sends 1/D of the bytes to the next one, at the pace of the slowest link.
    """
    if devices == 1:
        return 0.0
    per_host = cluster.devices_per_host
    links = [cluster.within_host] * (per_host > 1) + [cluster.between_hosts] * (devices > per_host)
    return (devices - 1) * max(link.latency_seconds + link.seconds(size / devices) for link in links)
