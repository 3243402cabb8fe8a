"""What a rank holds of the stages between two runs, and how all ranks together gather it, save it and load it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cdp_repro.engine.compute import Version
from cdp_repro.engine.delay import DelayFactory, Uncorrected
from cdp_repro.engine.messages import Layout, broadcast
from cdp_repro.engine.parameters import Buffers, OptimizerFactory, StageState, average, check_buffers, copied_like
from cdp_repro.engine.seal import Seal, StageSeal, differing
from cdp_repro.engine.shards import Shards
from cdp_repro.launch.team import Team
from cdp_repro.schedule import Schedule, Value, last_steps
from cdp_repro.schedule.values import Kind, buffers


class Holdings:
    """The stages of one rank: versions and optimizers of those that it holds, buffers of the micro-batches it computes.

    `values` are what the rank holds, by name. Within a run, the executor also keeps the values there that come and go.
    Methods that need all ranks say so.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        team: Team,
        optimizer: OptimizerFactory,
        delay: DelayFactory,
    ) -> None:
        self.values: dict[Value, Any] = {}
        self._schedule, self._stages, self._team = schedule, stages, team
        self._optimizer, self._delay = optimizer, delay
        self._layouts = [Layout.like(dict(stage.named_parameters())) for stage in stages]
        is_sharded = schedule.placement.is_sharded
        self.shards = [
            Shards(dict(stage.named_parameters()), team.rank, team.size, team.device) for stage in stages if is_sharded
        ]
        """Of each stage; empty if stages are held whole."""
        self._has_loaded = False
        delays = [self._delay_of(number) for number in range(len(stages))]  # all, so that all ranks refuse the same
        self.states = {
            number: self._state_of(number, delays[number])
            for number in range(len(stages))
            if team.rank in schedule.placement.holders(number)
        }
        """Of the stages that the rank holds, in whole or in part."""
        self._seals = [
            self.states[number].seal if self._is_whole(number) else Seal(dict(stage.named_parameters()))
            for number, stage in enumerate(stages)
        ]
        self._stage_seals = [StageSeal(number, stage) for number, stage in enumerate(stages)]
        first = {number: {0: state.newest(0)} for number, state in self.states.items()}
        self._set(0, first, [[dict(stage.named_buffers())] * schedule.sizes.statistics for stage in stages])

    def _delay_of(self, number: int) -> Uncorrected:
        """Return the method against delay of a stage; raise ValueError if the schedule does not give what it needs."""
        delay = self._delay([row[number] for row in self._schedule.rule.matrix])
        if delay.name != Uncorrected.name and (why := last_steps.refusal(self._schedule, delay.name)):
            raise ValueError(why)
        return delay

    def _state_of(self, number: int, delay: Uncorrected) -> StageState:
        """Return this rank's state of a stage: of the whole stage, or of its pieces of the parameters."""
        whole = dict(self._stages[number].named_parameters())
        if not self.shards:
            return StageState(whole, self._optimizer, delay)
        shards, trainable = self.shards[number], [p for p in whole.values() if p.requires_grad]
        pieces = {name: nn.Parameter(piece, whole[name].requires_grad) for name, piece in shards.pieces(whole).items()}
        return StageState(pieces, shards.optimizer(self._optimizer, trainable))

    def _is_whole(self, number: int) -> bool:
        """Whether this rank holds all of a stage."""
        return number in self.states and not self.shards

    def _set(
        self,
        step: int,
        versions: Mapping[int, Mapping[int, Version]],
        sets_of_buffers: Sequence[Sequence[Mapping[str, Tensor]]],
    ) -> None:
        """Set the values that this rank holds at a step: some `versions` of its stages, and copies of buffers."""
        self.values.clear()
        for value in self._schedule.held_after(step).get(self._team.rank, ()):
            if value.kind == Kind.PARAMETERS:
                self.values[value] = versions[value.stage][value.number]
            else:
                theirs = sets_of_buffers[value.stage][value.number]
                like = self._stages[value.stage].named_buffers()
                self.values[value] = {name: copied_like(buffer, theirs[name]) for name, buffer in like}

    def tell_others(self, settings: Mapping[str, object], run: int) -> None:
        """Tell other ranks the settings of this one's engine, its optimizers, and a number for each parameter.

        `run` is the number of the run that begins: before the first with a batch, there may be empty ones. With shards,
        a state that was loaded has changed only the pieces of ranks, of which no two hold the same.
        """
        is_told = not (self.shards and self._has_loaded)
        stages = {
            number: (
                state.optimizer_text,
                _sums_of_bits(dict(self._stages[number].named_parameters()) if is_told else {}),
            )
            for number, state in self.states.items()
        }
        told = {"settings": {name: str(value) for name, value in settings.items()}, "stages": stages}
        self._team.store.set(f"engine/{run}/{self._team.rank}", json.dumps(told))

    def check_alike(self, run: int) -> None:
        """Raise ValueError if this rank has other settings than rank 0, or has a stage otherwise than its first holder.

        Copies of a stage would stay different, as ranks exchange only gradients. Waits until those ranks have told
        theirs.
        """
        mine, firsts = self._team.rank, {number: self._schedule.placement.holders(number)[0] for number in self.states}
        told = {rank: json.loads(self._team.store.get(f"engine/{run}/{rank}")) for rank in {0, mine, *firsts.values()}}
        theirs, own = told[0]["settings"], told[mine]["settings"]
        if others := differing(theirs, own):
            raise ValueError(
                f"rank {mine} has made an engine with {others[0]}={own[others[0]]}, rank 0 with "
                f"{others[0]}={theirs[others[0]]}: make the same engine on all ranks"
            )
        for number, first in firsts.items():
            (optimizer, their_sums), (own_optimizer, sums) = (told[r]["stages"][str(number)] for r in (first, mine))
            if optimizer != own_optimizer:
                raise ValueError(
                    f"rank {mine} has for stage {number} the optimizer {own_optimizer}, rank {first} {optimizer}: give "
                    "the same to all that hold the stage"
                )
            if others := differing(their_sums, sums):
                raise ValueError(
                    f"rank {mine} has other parameters of stage {number} than rank {first}, such as {others[0]}, and "
                    "ranks do not exchange them at the start: call torch.manual_seed with the same number on all ranks "
                    "before the stages are made, or load the same weights"
                )

    def check_seals(self) -> None:
        """Raise ValueError if other code has changed a stage, or given a parameter a hook."""
        for stage in self._stage_seals:
            stage.check()
        for seal in self._seals:
            seal.check()

    def open_seals(self) -> None:
        """Let other code use the gradients of parameters."""
        for seal in self._seals:
            seal.open()

    def close_seals(self) -> None:
        """Record parameters and buffers as they are, and block gradients for other code."""
        for seal in self._seals:
            seal.close()
        for stage in self._stage_seals:
            stage.record()  # fake copies, too, count in the versions of what they are copies of

    def drop_others(self) -> None:
        """Free the parameters, in the modules, of all stages that this rank does not hold whole."""
        for number, stage in enumerate(self._stages):
            if not self._is_whole(number):
                for parameter in stage.parameters():
                    parameter.data = parameter.data.new_empty(0)

    def fill_in(self, step: int) -> None:
        """Give the modules all parameters, of version `step`, and the mean of all sets of buffers; collective."""
        for number, stage in enumerate(self._stages):
            whole = self._whole_parameters(number)
            for name, parameter in stage.named_parameters() if not self._is_whole(number) else ():
                parameter.data = whole[name]
        self.average_buffers(step)
        self.open_seals()

    def average_buffers(self, step: int) -> None:
        """Give the modules the mean of all sets of buffers; collective.

        Raises:
            ValueError: two stages share a buffer that they have changed, each its own sets of it.
        """
        given: dict[int, Tensor] = {}
        for number, stage in enumerate(self._stages):
            mean = average(self._all_buffers(number, step))
            for name, buffer in stage.named_buffers():
                first = given.setdefault(id(buffer), mean[name])
                if first is not mean[name] and not torch.equal(first, mean[name]):
                    raise ValueError(
                        f"stage {number} shares the buffer {name} with a stage before it, and both change it: each has "
                        "sets of its own, so put both uses into one stage, or give each a module of its own"
                    )
                buffer.copy_(mean[name])
        for seal in self._stage_seals:
            seal.record()

    def _whole_parameters(self, number: int) -> Mapping[str, Tensor]:
        """Return the current parameters of a stage, from its holders; collective."""
        if self.shards:
            transfer, views = self.shards[number].gather(self.states[number].newest(0).tensors)
            return {name: view.clone() for name, view in views(transfer.wait()).items()}
        own = dict(self._stages[number].named_parameters()) if self._is_whole(number) else None
        return broadcast(self._team, self._layouts[number], own, self._schedule.placement.holders(number)[0])

    def _all_buffers(self, number: int, step: int) -> list[Buffers]:
        """Return all sets of a stage's buffers after `step` steps, each from the rank that uses it next; collective."""
        found: list[Buffers] = []
        layout = Layout.like(dict(self._stages[number].named_buffers()))
        following, _ = self._schedule.ahead(step)
        for which in range(self._schedule.sizes.statistics):
            own = self.values.get(buffers(number, which))
            source = self._schedule.placement.rank_of(self._schedule.next_with(which, following), number)
            found.append(dict(broadcast(self._team, layout, own, source)))
        return found

    def _savers(self, step: int) -> dict[Value, int]:
        """Return, for each version of a stage that is held after `step` training steps, the rank that saves it.

        It is the first that holds it; only that rank puts the version into a checkpoint. Holders of a stage may have
        different versions: if micro-batches take turns on them, each has the newest and those that later micro-batches
        read there. A shard of a version has only one holder.
        """
        found: dict[Value, int] = {}
        for rank, values in sorted(self._schedule.held_after(step).items()):
            for value in values:
                if value.kind == Kind.PARAMETERS:
                    found.setdefault(value, rank)
        return found

    def state_dict(self, step: int) -> list[dict[str, Any]]:
        """Return the state of each stage after `step` steps, on rank 0; the others get an empty list; collective."""
        sets_of_buffers = [self._all_buffers(number, step) for number in range(len(self._stages))]
        savers = self._savers(step)
        parts = self._team.gather({number: self._own_state(number, savers) for number in self.states})
        if self._team.rank:
            return []
        return [
            {**self._whole_state([part[number] for part in parts if number in part], number), "buffers": sets}
            for number, sets in enumerate(sets_of_buffers)
        ]

    def _own_state(self, number: int, savers: Mapping[Value, int]) -> dict[str, Any]:
        """Return this rank's part of a stage's state: all of its shards, or else what no earlier holder has."""
        rank = self._team.rank
        versions = {
            value.number: content
            for value, content in self.values.items()
            if value.stage == number and savers.get(value) == rank
        }
        own = self.states[number].state_dict(versions)
        is_first = self.shards or self._schedule.placement.holders(number)[0] == rank
        return own if is_first else {"versions": own["versions"]}

    def _whole_state(self, parts: Sequence[dict[str, Any]], number: int) -> dict[str, Any]:
        """Return the state of a stage from the parts of its holders, in the order of their ranks."""
        if self.shards:
            return self.shards[number].join_states(parts, self.states[number].optimized)
        versions = {version: tensors for part in parts for version, tensors in part["versions"].items()}
        return {**parts[0], "versions": dict(sorted(versions.items()))}

    def differing_copies(self) -> list[str]:
        """Return, on rank 0, what a holder of a stage has of it that its first holder has otherwise; collective.

        A state has one copy of each version and of the optimizer: this tells whether it stands for all.
        """
        first: dict[str, Any] = {}
        return [
            f"{name} on rank {rank}"
            for rank, own in enumerate(self._team.gather({} if self.shards else self._sums_of_copies()))
            for name, sums in own.items()
            if first.setdefault(name, sums) != sums
        ]

    def _sums_of_copies(self) -> dict[str, dict[str, int]]:
        """Return the sums of what this rank holds of its stages, by what a reader calls it."""
        found = {
            f"version {value.number} of stage {value.stage}": _sums_of_bits(content.tensors)
            for value, content in self.values.items()
            if value.kind == Kind.PARAMETERS
        }
        for number, state in self.states.items():
            found[f"the optimizer of stage {number}"] = _sums_of_bits(state.kept_by_optimizer())
        return found

    def load_state_dict(self, step: int, stages: Sequence[dict[str, Any]]) -> None:
        """Take over a result of `state_dict` from any placement.

        Raises:
            ValueError: it is of another model, mode or optimizer; nothing is changed.
        """
        try:
            own = self._checked(step, stages)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state is damaged, or not of state_dict(): {error!r}") from None
        versions = {number: mine.load_state_dict(own[number]) for number, mine in self.states.items()}
        self._set(step, versions, [stage["buffers"] for stage in stages])
        self._has_loaded = True

    def _checked(self, step: int, stages: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return what this rank takes of a state, by stage, after a check that it can be loaded."""
        if len(stages) != len(self._stages):
            raise ValueError(f"the checkpoint has {len(stages)} stages, this engine {len(self._stages)}")
        savers, own = self._savers(step), dict[int, dict[str, Any]]()
        for number, mine in self.states.items():
            state = stages[number]
            own[number] = self.shards[number].cut_state(state, mine.optimized) if self.shards else state
            mine.check_state(own[number], {value.number for value in savers if value.stage == number})
        for stage, theirs in zip(self._stages, stages, strict=True):
            check_buffers(dict(stage.named_buffers()), theirs["buffers"], self._schedule.sizes.statistics)
        return own


def _sums_of_bits(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of the bits of each tensor, as whole numbers: the same in whatever order a device adds.

    Parameters of another seed or another file have other sums; numbers that change places within one do not show.
    """
    sums = {}
    for name, tensor in tensors.items():
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        sums[name] = int(values.contiguous().view(whole).sum(dtype=torch.int64))
    return sums
