"""The rows of the cost table: each mode on each placement, and the libraries."""

from __future__ import annotations

from cdp_repro.predict.closed_forms import Setting
from cdp_repro.schedule import COLLECTIVE_PLACEMENTS

EXECUTED_WORKERS = (2, 3, 4)
"""Numbers of workers with which every setting is executed."""

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
        if placement in COLLECTIVE_PLACEMENTS:
            found.append(Setting(f"{name}, collectives", "dp", placement, collectives=True))
        found += [Setting(name, mode, placement) for mode in ("cdp_v1", "cdp_v2")]
    libraries = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard", "torch_gpipe": "ScheduleGPipe",
             "torch_1f1b": "Schedule1F1B"}  # fmt: skip
    return [*found, *(Setting(f"torch {name}", "dp", "single_device", baseline=key) for key, name in libraries.items())]


SETTINGS = _settings()
