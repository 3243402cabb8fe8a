"""The systems of the field that are compared on the same sizes: mode and placement of each."""

from __future__ import annotations

from collections.abc import Iterator

from cdp_repro.schedule import MODES, Schedule, Spec
from cdp_repro.schedule.branches import two_towers

SYSTEMS = (
    ("dp", "replicated"), ("cdp_v1", "replicated"), ("cdp_v2", "replicated"),
    ("dp", "zero"), ("cdp_v1", "zero"), ("cdp_v2", "zero"), ("dp", "parameter_server"), ("cdp_v2", "parameter_server"),
    ("ssp", "parameter_server"), ("async", "parameter_server"),
    ("naive", "pipeline"), ("gpipe", "pipeline"), ("one_f_one_b", "pipeline"), ("interleaved", "pipeline"),
    ("zero_bubble", "pipeline"), ("terapipe", "pipeline"), ("chimera", "pipeline"), ("pipedream_2bw", "pipeline"),
    ("cdp_v2", "pipeline"), ("pipedream", "pipeline"), ("ampnet", "pipeline"),
)  # fmt: skip
"""Mode and placement. On a pipeline `cdp_v1` is `pipedream_2bw`."""

CHUNKS = 2
"""Stages a rank of the interleaved pipeline; all others have one."""


def fitting_specs(ranks: int, accumulate: int = 1, tokens: int = 0, is_branched: bool = False) -> Iterator[Spec]:
    """Yield the systems that can have these sizes: `ranks` ranks, `ranks` x `accumulate` micro-batches a mini-batch.

    `tokens` are those of a sequence that a causal model reads; 0 if samples cannot be cut along tokens. `is_branched`
    says whether the model has two towers.
    """
    for mode, placement in SYSTEMS:
        slices = MODES[mode].slices(None)
        if slices > 1 and (not tokens or tokens % slices):
            continue
        stages = ranks * CHUNKS if mode == "interleaved" else ranks
        each = MODES[mode].updates_each or MODES[mode].pushes
        try:
            sources = two_towers(stages) if is_branched else None
            spec = Spec(mode, ranks, stages, placement, accumulate=1 if each else accumulate, sources=sources)
            Schedule.of(spec)
        except ValueError:  # such as an odd number of ranks for Chimera
            continue
        yield spec
