"""The peers: what a user of torch would pick instead of our engine, behind the engine's interface."""

from cdp_repro.baselines.base import Baseline
from cdp_repro.baselines.data_parallel import DDPBaseline, FSDP2Baseline
from cdp_repro.baselines.pipeline import GPipeBaseline, OneFOneBBaseline

BASELINES: dict[str, type[Baseline]] = {
    "ddp": DDPBaseline,
    "fsdp2": FSDP2Baseline,
    "torch_gpipe": GPipeBaseline,
    "torch_1f1b": OneFOneBBaseline,
}
"""By the names of `baseline=`."""

__all__ = ["BASELINES", "Baseline", "DDPBaseline", "FSDP2Baseline", "GPipeBaseline", "OneFOneBBaseline"]
