"""Throughput of cdp_v2 over torch's data parallelism and pipelines: the bench `placements`."""

from __future__ import annotations

from benches.two_ranks import planned_seconds, rounds_on_two_ranks, throughput_over, two_ranks, two_ranks_text
from cdp_repro.launch import launch
from cdp_repro.predict.cutting import cut_model
from cdp_repro.predict.pricing.calibration import measure_network

BASELINES = {"pipeline": ("torch_1f1b", "torch_gpipe"), "replicated": ("ddp",), "zero": ("fsdp2",)}
ROUNDS = 8
STEPS = 6


def placements() -> dict[str, object]:
    """Throughput of cdp_v2 over torch's own data parallelism and pipelines, each on 2 processes with one thread, and as
    planned: the ratio of their prices."""
    config = two_ranks("resnet18", 32, stages=2)
    blocks = [len(names) for names in cut_model(config).block_names]
    ratios: dict[str, dict[str, float]] = {}
    planned: dict[str, float] = {}
    buckets: dict[str, float] = {}
    network = measure_network()
    for placement, baselines in BASELINES.items():
        arguments = config, blocks, ("cdp_v2",), placement, baselines, ROUNDS, STEPS
        seconds, bucket = launch(rounds_on_two_ranks, arguments, config.workers)
        prices = planned_seconds(config, blocks, network)
        for baseline in baselines:
            name = f"{placement} / {baseline}"
            ratios[name] = throughput_over(seconds, "cdp_v2", baseline)
            buckets |= {name: bucket} if bucket else {}
            planned[name] = prices[f"dp {baseline}"] / prices[f"cdp_v2 {placement}"]
            print(name, ratios[name], "planned", planned[name], flush=True)
    return {
        "config": two_ranks_text(config, blocks, "gloo on loopback"),
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "ddp_bucket_mib": buckets,
        "throughput_ratios": ratios,
        "planned_ratios": planned,
    }
