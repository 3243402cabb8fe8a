"""Closed forms: the cost of each setting of the cost table by formula.

The forms hold for S = N stages of any sizes. Stage j keeps a_j activation bytes of a micro-batch that waits for its
backward, and e_j more until its output has been sent. It has p_j parameter bytes and as many gradient bytes. A is the
sum of a_j, and P that of p_j. o_j are the bytes of its output, i_j those of the gradient of its input. The docstring of
`closed_form` derives the forms; the report compares them with simulation and execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdp_repro.predict.costs import StageCosts
from cdp_repro.schedule import Schedule
from cdp_repro.schedule.parts import part_bytes
from cdp_repro.schedule.summation.exchange_in_parts import leaves_in_parts

QUANTITIES = (
    "devices", "activation_bytes_per_device", "activation_bytes_total", "parameter_bytes_per_device",
    "optimizer_bytes_per_device", "versions_kept", "sent_bytes_per_device", "most_sent_bytes", "messages_per_slot",
    "chain", "idle_share",
)  # fmt: skip

Values = dict[str, float]
"""Numbers by quantity; unknown quantities are missing."""


@dataclass(frozen=True)
class Setting:
    """One row of the cost table."""

    name: str
    """For people."""
    mode: str
    placement: str
    pipeline_schedule: str = "one_f_one_b"
    baseline: str | None = None
    collectives: bool = False

    def schedule(self, workers: int, gradient_bytes: Sequence[int] = ()) -> Schedule:
        """Return the schedule for N = S."""
        return Schedule.build(
            self.mode, workers, placement=self.placement, pipeline_schedule=self.pipeline_schedule,
            collectives=self.collectives, gradient_bytes=gradient_bytes,
        )  # fmt: skip


def closed_form(setting: Setting, workers: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return those quantities of a setting with N = S >= 2 workers for which there is a formula.

    - Activations. In the cyclic timeline, stage j keeps a micro-batch from slot 2m+j to 2m+2N-1-j, and one starts every
      second slot: N-j are alive in every slot. The sum over workers is sum (N-j) a_j: (N+1)/2 A for equal stages,
      against N A in data parallelism. A worker's own peak is A; device j of a pipeline holds (N-j) a_j, and a device of
      a model-parallel group a_j. If micro-batches do not move, this is of stages whose backwards release what their
      forwards leave; others have no closed form. If they move, outputs about to be sent add e_j on the stages that run
      a forward, which is every second stage.
    - Versions. A stale stage has two, each for part of the time, on the ranks that all workers read from. A worker's
      own copy has one at a time. CDP-v2's last stage is always fresh.
    - Messages. Replicated, both modes: N-1 partial sums and N-1 relayed totals of each stage. ZeRO: one parameter
      message for each forward and backward and one gradient to the owner, but none from the owner to itself:
      3P(N-1)/N per rank. Model parallel: sums along a stage's group of n ranks and totals back, N-1 + n-1 if n > 1.
      Two ranks exchange their sums, so that the second message waits for nothing. They do so in parts if stages are
      large and very uneven; the number of messages per slot then depends on the sizes. Activations and their gradients:
      N of each over each boundary. Collectives are rings, and the data that a rank sends in one counts as a message: N
      for an all-reduce, which goes round twice; N for an all-gather or a reduce-scatter. Each slot has two of these,
      the second after the first if it gathers what was just made. A rank then holds 1/N of every stage.
    - Idle share. A pipeline with a flush idles (N-1)/(2N-1), model-parallel groups of N ranks 1 - 1/N, and groups of
      N-j ranks (N-1)/(N+1). All others never idle.
    """
    if setting.baseline is not None:
        return _closed_form_of_baseline(setting.baseline, workers, costs, optimizer_states)
    n = workers
    values: Values = {"devices": _devices(setting, n)}
    values |= _activations(setting, n, costs) | _state(setting, n, costs, optimizer_states)
    values |= _messages(setting, n, costs) | {"idle_share": _idle_share(setting, n)}
    return values


def _devices(setting: Setting, n: int) -> int:
    if setting.placement == "single_device":
        return 1
    if setting.placement == "model_parallel":
        return n * n if setting.mode == "dp" else n * (n + 1) // 2
    return n


def _activations(setting: Setting, n: int, costs: StageCosts) -> Values:
    stages, moves = range(n), setting.placement in ("pipeline", "model_parallel")
    received = [costs.received_bytes(j)[0] if moves and j else 0 for j in stages]
    leaving = [costs.released_by_sending(j) if moves and j < n - 1 else 0 for j in stages]  # e_j
    kept = [costs.forward_bytes[j] + received[j] - leaving[j] for j in stages]  # a_j
    whole = sum(kept)
    triangle = sum((n - j) * kept[j] for j in stages)
    if setting.mode == "accumulation":
        return {"activation_bytes_per_device": whole, "activation_bytes_total": whole}
    staggered = setting.mode != "dp" or (setting.placement == "pipeline" and setting.pipeline_schedule != "gpipe")
    total = triangle if staggered else n * whole
    if setting.placement == "pipeline":
        per_device = max((n - j if staggered else n) * kept[j] + leaving[j] for j in stages)
    elif setting.placement == "model_parallel":
        per_device = max(kept[j] + leaving[j] for j in stages)
    else:
        per_device = total if setting.placement == "single_device" else whole
    values: Values = {"activation_bytes_per_device": per_device, "activation_bytes_total": total}
    if any(leaving):  # how many outputs are about to be sent at once depends on the sizes
        del values["activation_bytes_total"]
    elif staggered and not moves and costs.forward_bytes != costs.backward_bytes:
        # an output that only the next stage needs is gone one backward earlier; which of them are there at the peak
        # depends on the sizes
        del values["activation_bytes_total"]
        if setting.placement == "single_device":
            del values["activation_bytes_per_device"]
    return values


def _state(setting: Setting, n: int, costs: StageCosts, optimizer_states: int) -> Values:
    is_sharded = setting.collectives and setting.placement == "zero"
    p = [min(size, part_bytes(size, n)) for size in costs.parameter_bytes] if is_sharded else costs.parameter_bytes
    stale = [setting.mode == "cdp_v1" or (setting.mode == "cdp_v2" and j < n - 1) for j in range(n)]
    if setting.placement == "replicated":
        stale = [False] * n  # a worker's own copy: nothing reads the old version once the new one is made
    elif setting.placement == "model_parallel":
        stale = [setting.mode == "cdp_v1" and j == n - 1 for j in range(n)]  # all other groups have several ranks
    held = [(1 + is_stale) * size for is_stale, size in zip(stale, p, strict=True)]
    shared = is_sharded or setting.placement in ("single_device", "replicated")
    is_v2_on_one = setting.mode == "cdp_v2" and setting.placement == "single_device"
    together = sum(p) + _overlap_of_v2(n, p) if is_v2_on_one else sum(held)
    return {
        "parameter_bytes_per_device": together if shared else max(held),
        "optimizer_bytes_per_device": optimizer_states * (sum(p) if shared else max(p)),
        "versions_kept": 1 + any(stale),
    }


def _overlap_of_v2(n: int, p: Sequence[int]) -> int:
    """Return the largest number of bytes of second versions that CDP-v2 keeps at once on one device.

    Stage j has two versions from slot 2Nt + 4N-3-j, when the new one is made, until 2Nt + 6N-6-3j, after which no stale
    worker i <= N-2-j reads the old one. So just after stage k has got its second version, the stages with two are
    k <= j <= (2N-3+k)/3, and from the step before j <= (k-3)/3.
    """

    def at(k: int) -> int:
        return sum(p[k : min((2 * n - 3 + k) // 3, n - 2) + 1]) + sum(p[: k // 3])

    return max(map(at, range(n - 1)), default=0)


def _messages(setting: Setting, n: int, costs: StageCosts) -> Values:
    """Return bytes sent by a device in a step, messages in the busiest slot, and the longest chain of messages.

    A chain is a sequence of messages between two slots, each of which waits for the one before. With `dp`, all
    gradients of a stage are ready in the same slot, and the sum passes through all N ranks and back at once: a chain of
    2(N-1). In the cyclic timeline, the gradients become ready one after the other, so that each message has its own
    slot: on `replicated` a chain of 1.

    Example: N = 4, `replicated`, stages of g bytes each. A rank sends 2 (4 g) 3/4 = 6 g in a step for every mode. With
    `dp` the busiest slot has 6 messages in a chain of 6; with `cdp_v2` 4 messages, none of which waits for another.

    Invariant: on a given placement, all modes send the same bytes and only differ in slots and chains. `model_parallel`
    is the exception: its groups of ranks are smaller in the cyclic timeline.
    """
    total = sum(costs.gradient_bytes)
    boundary = n * (sum(costs.output_bytes[:-1]) + sum(costs.input_gradient_bytes[1:]))
    is_dp = setting.mode == "dp"
    if setting.placement == "single_device":
        return {"sent_bytes_per_device": 0, "messages_per_slot": 0, "chain": 0}
    if setting.collectives:
        return _collectives(setting, n, costs)
    if setting.placement == "replicated":
        sent, chain = 2 * total * (n - 1) / n, _chain_of_sums(n) if is_dp else 1
        messages = 2 * (n - 1) if is_dp else n if n > 2 else 1
    elif setting.placement == "zero":
        sent = (2 * sum(costs.parameter_bytes) + total) * (n - 1) / n
        messages = 2 * (n - 1) if is_dp else -(-3 * n // 2)
        chain = 1 if setting.mode == "cdp_v1" else 2
    elif setting.placement == "pipeline":
        sent, messages, chain = boundary / n, n - 1 if is_dp else n // 2 * 2, 1
    else:
        ranks = [n if is_dp else n - j for j in range(n)]
        sums = sum((n - 1 + r - 1) * size for r, size in zip(ranks, costs.gradient_bytes, strict=True) if r > 1)
        sent = (boundary + sums) / sum(ranks)
        messages, chain = (2 * n, _chain_of_sums(n)) if is_dp else (2 * (n - 1), 1)
    values: Values = {"sent_bytes_per_device": sent, "messages_per_slot": messages, "chain": chain}
    if (setting.placement, setting.mode) == ("model_parallel", "cdp_v2"):
        del values["messages_per_slot"]  # 2(N-1) up to N = 6, less beyond: which totals meet in a slot depends on N
    elif leaves_in_parts(setting.schedule(n, costs.gradient_bytes)):
        del values["messages_per_slot"]  # how many parts there are depends on the sizes
    return values


def _chain_of_sums(n: int) -> int:
    """Return how many messages follow one another until n > 1 ranks that start together all have the sum."""
    return 2 * (n - 1) if n > 2 else 1


def _collectives(setting: Setting, n: int, costs: StageCosts) -> Values:
    is_reduced_everywhere = setting.placement == "replicated"
    sent = (
        2 * sum(costs.gradient_bytes)
        if is_reduced_everywhere
        else 2 * sum(costs.parameter_bytes) + sum(costs.gradient_bytes)
    )
    messages = n if is_reduced_everywhere else 2 * n
    return {"sent_bytes_per_device": sent * (n - 1) / n, "messages_per_slot": messages, "chain": 2 * (n - 1)}


def _idle_share(setting: Setting, n: int) -> float:
    if setting.placement == "pipeline" and setting.mode == "dp":
        return (n - 1) / (2 * n - 1)
    if setting.placement == "model_parallel":
        return 1 - 1 / n if setting.mode == "dp" else (n - 1) / (n + 1)
    return 0.0


def _closed_form_of_baseline(baseline: str, n: int, costs: StageCosts, optimizer_states: int) -> Values:
    """Return the published costs of a library: DDP's ring all-reduce, FSDP2's two all-gathers and a reduce-scatter, or
    the activations and gradients of a pipeline with a flush."""
    p, g = costs.parameter_bytes, sum(costs.gradient_bytes)
    values: Values = {"devices": n, "versions_kept": 1}
    if baseline == "ddp":
        sent, held = 2 * g * (n - 1) / n, float(sum(p))
    elif baseline == "fsdp2":
        sent, held = (2 * sum(p) + g) * (n - 1) / n, sum(p) / n
    else:
        sent = sum(costs.output_bytes[:-1]) + sum(costs.input_gradient_bytes[1:])
        held = float(max(p))
        values["idle_share"] = (n - 1) / (2 * n - 1)
    return values | {
        "sent_bytes_per_device": sent,
        "parameter_bytes_per_device": held,
        "optimizer_bytes_per_device": optimizer_states * held,
    }
