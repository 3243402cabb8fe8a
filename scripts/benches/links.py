"""Throughput over the rate of the link between two hosts: the benches `links_resnet18` and `links_vit`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benches.on_hosts import run_on_hosts
from benches.two_ranks import planned_seconds, rounds_on_two_ranks, throughput_over, two_ranks, two_ranks_text
from cdp_repro.config import RunConfig
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing.calibration import network_of, time_messages
from two_hosts import two_hosts

NETWORKS = {"links_resnet18": ("resnet18", 32, 6), "links_vit": ("vit_tiny_patch16_224", 64, 8)}
"""By bench: network, pixels and stages. Most parameters of the first are in two of ten blocks; the second's are equal.
"""
MODES = ("cdp_v1", "cdp_v2")
RATES_MBIT = (100, 250, 500, 1000, 1500, 2000, None)
ROUNDS, STEPS = 3, 6


def links(name: str) -> dict[str, object]:
    """Throughput of CDP over DistributedDataParallel, replicated on two hosts, over the rate of their link."""
    config = two_ranks(*NETWORKS[name])
    blocks = [len(names) for names in cut_model(config).block_names]
    return {
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "model": config.model.name,
        "config": two_ranks_text(config, blocks, "gloo between two network namespaces, rate limited by tbf"),
        "rows": [_over_link(name, config, blocks, rate) for rate in RATES_MBIT],
    }


def _over_link(name: str, config: RunConfig, blocks: list[int], rate_mbit: int | None) -> dict[str, object]:
    """Measure one point of the curves."""
    with two_hosts(rate_mbit) as hosts:
        measured = run_on_hosts(hosts, "benches.links", [name, json.dumps(blocks)])
    link, collectives = network_of(measured["messages"])
    prices = planned_seconds(config, blocks, (link, collectives))
    gradient_bytes = sum(cut_model(config, blocks).costs.gradient_bytes)
    row = {
        "rate_mbit": rate_mbit,
        "measured_mbit": 8e-6 * link.bandwidth_bytes_per_second,
        "ddp_bucket_mib": measured["ddp_bucket_mib"],
        "link_seconds_over_compute": link.seconds(gradient_bytes) / prices["cdp_v2 single_device"] * config.workers,
        "throughput_ratios": {mode: throughput_over(measured["seconds"], mode, "ddp") for mode in MODES},
        "planned_ratios": {mode: prices["dp ddp"] / prices[f"{mode} replicated"] for mode in MODES},
    }
    print(config.model.name, row, flush=True)
    return row


def _rank(name: str, blocks: list[int], path: Path) -> None:
    """Be one of the two ranks of `links`."""
    config = two_ranks(*NETWORKS[name])
    messages = time_messages(3)
    os.environ["MASTER_PORT"] = "29501"  # else a rank could meet the other at the store that is just closing
    seconds, bucket = rounds_on_two_ranks(config, blocks, MODES, "replicated", ("ddp",), ROUNDS, STEPS)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps({"messages": messages, "seconds": seconds, "ddp_bucket_mib": bucket}))


if __name__ == "__main__":
    _rank(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
