"""What a checkpoint must have in common with the run that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from cdp_repro.config import RunConfig
from cdp_repro.config.keys import NEUTRAL_KEYS, PLACEMENT_KEYS, flat, settings_of
from cdp_repro.schedule import Spec
from cdp_repro.training.checkpoint import CheckpointError


def refuse_foreign(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a checkpoint's configuration or data differ from the run's, as far as given."""
    differing: dict[str, list[str]] = {}
    for part, by_key in (("config", settings_of), ("data", flat)):
        kept = found.get(part, {})
        if not isinstance(kept, Mapping):
            raise CheckpointError(f"the checkpoint does not fit this run: its {part} is {kept!r}, no values by name")
        if part in expected:
            theirs, ours = by_key(kept), by_key(expected[part])
            if part == "data" and "fingerprint" in ours and theirs.get("fingerprint") == ours["fingerprint"]:
                continue  # perhaps under another name, such as that of a copied file
            differing[part] = [
                f"{key} is {theirs.get(key)} in the checkpoint, {ours.get(key)} in the run"
                for key in sorted({*theirs, *ours})
                if theirs.get(key) != ours.get(key) and key not in NEUTRAL_KEYS
            ]
    if differing.get("config"):
        said = "; ".join(chain(*differing.values()))
        raise CheckpointError(f"the checkpoint is of another run: {said}. Resume the run that it belongs to")
    if differing.get("data"):
        raise CheckpointError(
            f"the data are not those with which the run began: {'; '.join(differing['data'])}. Put those back, or say "
            "where they are by dataset.root="
        )


def is_moved(earlier: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether a run goes on elsewhere than by its earlier configuration: on another placement, or by another program.

    A number of ranks or servers that was left out is the same as the one that it stands for.
    """
    theirs = settings_of(earlier)

    def where(spec: Spec) -> tuple[object, ...]:
        return spec.placement, spec.collectives, spec.chosen_mode.timeline, spec.sizes

    here = config.spec()
    there = replace(here, **{key.removesuffix(".name"): theirs[key] for key in PLACEMENT_KEYS})
    return where(there) != where(here) or theirs["program"] != config.program
