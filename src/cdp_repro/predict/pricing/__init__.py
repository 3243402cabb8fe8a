"""The price of a training step on a cluster: seconds, idle share and bytes, of our systems and of the baselines."""

from cdp_repro.predict.pricing.cluster import Cluster, Collectives, Link
from cdp_repro.predict.pricing.extrapolated import estimate, is_extrapolated
from cdp_repro.predict.pricing.libraries import price_ddp, price_fsdp2
from cdp_repro.predict.pricing.self_timed import Price, price

__all__ = [
    "Cluster",
    "Collectives",
    "Link",
    "Price",
    "estimate",
    "is_extrapolated",
    "price",
    "price_ddp",
    "price_fsdp2",
]
