"""Mini-batches: the interface that the engine expects of its data, and the wrapper for plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cdp_repro.engine.ending import Ending
from cdp_repro.schedule.sizes import Sizes


@runtime_checkable
class MiniBatch(Protocol):
    """The data of one training step, cut into M micro-batches."""

    def inputs(self, micro_batch: int) -> Tensor:
        """Return the inputs of micro-batch i of the step, [B/M, ...], in their own storage."""
        ...

    def targets(self, micro_batch: int) -> Any:
        """Return what the loss takes beside the output: [B/M, ...] in its own storage, or such in dicts and lists."""
        ...


class TensorMiniBatch:
    """A mini-batch held as two tensors; micro-batch i is the i-th slice."""

    def __init__(self, inputs: Tensor, targets: Tensor, micro_batches: int, device: torch.device) -> None:
        """`inputs` and `targets` are [B, ...] each; raise ValueError unless B is a multiple of `micro_batches`."""
        if len(inputs) != len(targets):
            raise ValueError(f"a mini-batch has {len(inputs)} inputs but {len(targets)} targets; it needs one for each")
        if not len(inputs) or len(inputs) % micro_batches:
            nearest = max(1, len(inputs) // micro_batches) * micro_batches
            raise ValueError(
                f"a mini-batch of {len(inputs)} is not divisible by its {micro_batches} micro-batches "
                f"of a training step (slices of the same samples count as one); {nearest} would be. "
                "The last batch of a DataLoader is left out by drop_last=True"
            )
        self._inputs, self._targets = inputs, targets
        self._writes = self._writes_now()
        self._micro_batches, self._device = micro_batches, device

    def inputs(self, micro_batch: int) -> Tensor:
        """Return a copy of slice `micro_batch` of the inputs on the device, [B/M, ...]."""
        return self._slice(self._inputs, micro_batch)

    def targets(self, micro_batch: int) -> Tensor:
        """Return a copy of slice `micro_batch` of the targets on the device, [B/M, ...]."""
        return self._slice(self._targets, micro_batch)

    def _writes_now(self) -> list[int]:
        """Return how often each tensor has been written to; 0 for one that does not count."""
        return [0 if tensor.is_inference() else tensor._version for tensor in (self._inputs, self._targets)]

    def _slice(self, tensor: Tensor, micro_batch: int) -> Tensor:
        if self._writes_now() != self._writes:
            raise ValueError(
                "a mini-batch was changed after it was given: up to two training steps are under way, or one for each "
                "micro-batch in flight, and they still read their mini-batches. Give each mini-batch tensors of its own"
            )
        size = len(tensor) // self._micro_batches
        return tensor[micro_batch * size : (micro_batch + 1) * size].to(self._device, copy=True)


class SlicedMiniBatch:
    """A mini-batch of sequences whose micro-batches are slices of them, in the order of `Sizes.place`."""

    def __init__(self, whole: MiniBatch, sizes: Sizes) -> None:
        """`whole` is cut along its samples only."""
        self._whole, self._sizes = whole, sizes

    def inputs(self, micro_batch: int) -> Tensor:
        """Return the slice of the inputs, [B L / M, T / L, ...]."""
        return self._slice(self._whole.inputs, micro_batch)

    def targets(self, micro_batch: int) -> Tensor:
        """Return the slice of the targets, [B L / M, T / L, ...]."""
        return self._slice(self._whole.targets, micro_batch)

    def _slice(self, read: Callable[[int], Tensor], micro_batch: int) -> Tensor:
        part, place = self._sizes.place(micro_batch)
        whole, slices = read(part), self._sizes.slices
        if not isinstance(whole, Tensor):
            raise ValueError(f"slices={slices} cut tensors [samples, tokens, ...], not a {type(whole).__name__}")
        tokens = whole.shape[1] if whole.ndim > 1 else 0
        if not tokens or tokens % slices:
            raise ValueError(
                f"slices={slices} cut sequences, [samples, tokens, ...], along tokens that they divide, not a tensor "
                f"{[*whole.shape]}: give {max(1, tokens // slices) * slices} tokens, and a target for each"
            )
        return whole.narrow(1, place * tokens // slices, tokens // slices).clone()


def tensors_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs [B, ...] and targets [B, ...] of a mini-batch; raise ValueError if it is not two such tensors."""
    parts = batch if isinstance(batch, (tuple, list)) else [batch]
    if len(parts) == 2 and all(isinstance(part, Tensor) and part.ndim for part in parts):
        return parts[0], parts[1]
    found = (f"a tensor {[*part.shape]}" if isinstance(part, Tensor) else f"a {type(part).__name__}" for part in parts)
    raise ValueError(
        f"a mini-batch is two tensors, (inputs [B, ...], targets [B, ...]), not ({', '.join(found)}); what needs more "
        "is an object with the methods inputs(micro_batch), which returns one tensor, and targets(micro_batch)"
    )


def one_tensor(inputs: object) -> Tensor:
    """Return the inputs of a micro-batch; raise ValueError unless they are one tensor, as between stages."""
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"inputs(micro_batch) gave a {type(inputs).__name__}, not one tensor [B/M, ...]: put together what belongs "
            "together, as by torch.cat, and take it apart in the first stage"
        )
    return inputs


class Feed:
    """Begins training steps while there are batches, and holds the batches of the steps under way."""

    def __init__(self, batches: Iterable[MiniBatch], first_step: int, ending: Ending) -> None:
        """`ending` tells this rank when all ranks end the run."""
        self._batches: Iterator[MiniBatch] = iter(batches)
        self.first_step = first_step
        self._ending = ending
        self._held: dict[int, MiniBatch] = {}
        self._error: Exception | None = None
        self._is_closed = False
        self.begun = 0
        """Training steps of this run that have begun."""

    def begin_step(self) -> bool:
        """Begin the next training step if there is a batch for it; return whether there is.

        An error in the source ends the steps, as its end does; `raise_error` raises it once the pipeline has drained.
        If other ranks have begun more steps, this rank continues too.

        Raises:
            ValueError: other ranks have begun more steps than this one has batches for.
        """
        batch = None if self._is_closed else self._next()
        if batch is None:
            if self._ending.ends_after(self.begun):
                return False
            batch = self._next()
        if batch is None:
            self.raise_error()
            raise ValueError(
                f"another rank has begun more than {self.begun} steps, but the batches of this one end there: give "
                "all ranks the same number of batches"
            )
        self._held[self.first_step + self.begun] = batch
        self.begun += 1
        self._ending.begin(self.begun)
        return True

    def first(self) -> MiniBatch | None:
        """Return the batch of the first step without consuming it; None if there is none."""
        batch = self._next()
        if batch is not None:
            self._batches = chain([batch], self._batches)
            self._ending.begin(1)  # announced early: a rank without a batch sees at once that others have one
        return batch

    def _next(self) -> MiniBatch | None:
        """Return the next batch; None at the end and after an error in the source."""
        try:
            return next(self._batches, None)
        except Exception as error:
            self._error = error
            self._batches = iter(())
            return None

    def raise_error(self) -> None:
        """Raise the error of the source of the batches, if there was one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """From now on, begin no more steps than other ranks do."""
        self._is_closed = True

    def __getitem__(self, step: int) -> MiniBatch:
        return self._held[step]

    def release(self, step: int) -> None:
        """Forget the batch of a finished step."""
        del self._held[step]
