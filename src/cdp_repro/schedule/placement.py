"""Placements: where each action runs. A placement names ranks; it never says how data gets there."""

from __future__ import annotations

from typing import Protocol

from cdp_repro.schedule.actions import Action


class Placement(Protocol):
    """Maps the actions of a schedule to ranks (one rank is one process with one device)."""

    name: str

    def ranks(self, workers: int, stages: int) -> int:
        """Return how many ranks the placement needs."""
        ...

    def ranks_of(self, action: Action) -> tuple[int, ...]:
        """Return the ranks that run `action`: one for compute, every holder of the stage's state otherwise."""
        ...


class SingleDevice:
    """Everything on rank 0, which holds one copy of each stage, in as many versions as the rule needs."""

    name = "single_device"

    def ranks(self, workers: int, stages: int) -> int:  # noqa: ARG002 - the protocol's arguments
        """Return 1."""
        return 1

    def ranks_of(self, action: Action) -> tuple[int, ...]:  # noqa: ARG002 - the protocol's arguments
        """Return rank 0."""
        return (0,)


PLACEMENTS: dict[str, Placement] = {"single_device": SingleDevice()}
