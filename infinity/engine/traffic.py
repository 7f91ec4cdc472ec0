"""What each stage keeps on a rank, and what a step moves: the formulas, in one place.

Everything is in bytes, of one rank, and each is a multiple of what the whole model has (``State``). They are exact for
what collectives send. For NVMe they say what moves where nothing of the state stays in host memory from one use to the
next: what stays there is not moved, so a step moves at most that. Two things are not in it, which little memory may
cause: what was read ahead and had to leave again, and a rank's own gradients of whole parts that leave before they are
reduced (all of them may, inside ``no_sync``).

Sent: of a tensor of B bytes each of N ranks has, or gets, a slice of B / N; in an all-gather it sends its slice to each
of the others, in a reduce-scatter it sends each of the others theirs. Both are B * (N - 1) / N, also where a library
passes them on along a ring or a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from infinity.engine.formats import FormatOf
from infinity.engine.states import StateFormatOf
from infinity.engine.unit import PARAM, Part

ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"

DIVIDED = {
    0: (),
    1: ("master weights", "optimizer states"),
    2: ("master weights", "optimizer states", "gradients"),
    3: ("master weights", "optimizer states", "gradients", "parameters"),
}
"""What ranks divide among them, by stage."""


@dataclass(frozen=True, slots=True)
class State:
    """The bytes of a whole model's state, by what they are for.

    Attributes:
        params: what computes.
        masters: what a step keeps of the weights beside; 0 where the parameters themselves are stepped.
        states: optimizer states.
        grads: gradients as one backward makes them.
        grad_sums: gradients in the dtype of sums.
        step_reads_params: whether a step makes the weights of parameters and ``masters``, instead of ``masters`` alone.
    """

    params: int
    masters: int
    states: int
    grads: int
    grad_sums: int
    step_reads_params: bool = False

    @property
    def num_bytes(self) -> int:
        """All of it; gradients as one backward leaves them."""
        return self.params + self.masters + self.states + self.grads


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does.

    Attributes:
        num_gathers: how many times each unit is gathered: forward and backward make 2 for each micro-batch where device
            memory does not keep it between them, and 1 where it keeps all.
        num_reductions: backwards outside ``no_sync``.
        reduces_sums: whether gradients travel in the dtype of sums: with ``reduction_dtype="fp32"``, and where some
            backwards were in ``no_sync`` and are summed in it.
    """

    num_gathers: int = 2
    num_reductions: int = 1
    reduces_sums: bool = False


@dataclass(frozen=True, slots=True)
class Flow:
    """One kind of state on one rank.

    Attributes:
        kept: what there is of it, in host memory and on NVMe together.
        read: what a step reads of it from below host memory, where nothing of it stays there.
        written: what it writes.
    """

    kept: int
    read: int
    written: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank moves in one step.

    Attributes:
        sent: to other ranks, by kind of collective; as much is received.
        flows: by kind of state; see ``kept``.
        to_device: from host memory to an accelerator.
        from_device: from an accelerator to host memory.
    """

    sent: Mapping[str, int]
    flows: Mapping[str, Flow]
    to_device: int
    from_device: int

    @property
    def nvme_read(self) -> int:
        """From NVMe, at most."""
        return sum(flow.read for flow in self.flows.values())

    @property
    def nvme_written(self) -> int:
        """To NVMe, at most."""
        return sum(flow.written for flow in self.flows.values())

    def beyond(self, host_bytes: int) -> tuple[int, int]:
        """What must be read from NVMe, and written there, where host memory keeps so many bytes of what moves most."""
        read = written = 0
        for flow in sorted(self.flows.values(), key=_moves_per_byte, reverse=True):
            stays = min(flow.kept, host_bytes)
            host_bytes -= stays
            leaves = 1 - stays / flow.kept if flow.kept else 0
            read += round(flow.read * leaves)
            written += round(flow.written * leaves)
        return read, written


def state_of(parts: Iterable[Part], format_of: FormatOf, state_format_of: StateFormatOf) -> State:
    """The state of some parts: whole ones make that of the model, a rank's slices what it stores.

    Args:
        parts: which.
        format_of: how their weights are stored.
        state_format_of: how their optimizer states are.
    """
    params = masters = states = grads = grad_sums = 0
    reads_params = False
    for part in parts:
        weights = format_of(part).shards(part)
        params += weights[PARAM]
        masters += sum(weights.values()) - weights[PARAM]
        if part.stepped:
            states += len(part.state_names) * state_format_of(part, part.step_dtype).num_bytes(part)
            grads += part.param_bytes
            grad_sums += part.num_bytes(part.sum_dtype)
            reads_params = reads_params or PARAM in format_of(part).read_by_step(part)
    return State(params, masters, states, grads, grad_sums, reads_params)


def state_for(
    num_parameters: int, *, compute_dtype: torch.dtype, states_bytes: int = 8, in_planes: bool = False
) -> State:
    """The state of so many parameters that are all stepped in fp32, without what aligns them.

    Args:
        num_parameters: elements.
        compute_dtype: what computes.
        states_bytes: optimizer states of one element; AdamW's are two of fp32.
        in_planes: whether 16-bit parameters have residuals of 2 bytes beside them, in place of fp32 masters.
    """
    width = compute_dtype.itemsize
    is_mixed = compute_dtype != torch.float32
    return State(
        params=num_parameters * width,
        masters=num_parameters * (0 if not is_mixed else 2 if in_planes else 4),
        states=num_parameters * states_bytes,
        grads=num_parameters * width,
        grad_sums=num_parameters * 4,
        step_reads_params=not is_mixed or in_planes,
    )


def kept(state: State, stage: int, num_ranks: int) -> dict[str, int]:
    """What a rank keeps in host memory and on NVMe together, by what it is for.

    Stages 1 and 2 keep the parameters whole beside the slices that are stepped, from one step to the next.
    """
    divided = stage if num_ranks > 1 else 0
    sizes = {
        "parameters": _share(state.params, num_ranks, divided >= 1),
        "gathered parameters": state.params if divided in (1, 2) else 0,
        "master weights": _share(state.masters, num_ranks, divided >= 1),
        "optimizer states": _share(state.states, num_ranks, divided >= 1),
        "gradients": _share(state.grads, num_ranks, divided >= 2),
    }
    return {kind: size for kind, size in sizes.items() if size}


def moved(state: State, stage: int, num_ranks: int, work: Work) -> Moved:
    """What a rank moves in a step."""
    divided = stage if num_ranks > 1 else 0
    gathered = state.params * {0: 0, 1: 1, 2: 1, 3: work.num_gathers}[divided]
    reduced = (state.grad_sums if work.reduces_sums else state.grads) * work.num_reductions
    sent = {
        ALL_GATHER: sent_bytes(gathered, num_ranks) + (sent_bytes(reduced, num_ranks) if divided < 2 else 0),
        REDUCE_SCATTER: sent_bytes(reduced, num_ranks),
    }
    sizes = kept(state, stage, num_ranks)
    # In stages 1 and 2 a unit's first gather in a step reads the slices and writes the whole, which the others read.
    read = dict(sizes)
    read["parameters"] *= (1 if divided in (1, 2) else work.num_gathers) + state.step_reads_params
    if "gathered parameters" in sizes:
        read["gathered parameters"] *= work.num_gathers - 1
    brought = read["parameters"] - sizes["parameters"] * state.step_reads_params + read.get("gathered parameters", 0)
    return Moved(
        sent={kind: size for kind, size in sent.items() if size},
        flows={kind: Flow(size, read[kind], size) for kind, size in sizes.items()},
        to_device=brought,
        from_device=state.grads * work.num_reductions,
    )


def sent_bytes(num_bytes: int, num_ranks: int) -> int:
    """What one rank sends in an all-gather that makes so many bytes, or in a reduce-scatter of them."""
    return _share(num_bytes, num_ranks, True) * (num_ranks - 1)


def _share(num_bytes: int, num_ranks: int, is_divided: bool) -> int:
    """One rank's of it; a model's parts are padded so that a slice is exact."""
    return -(-num_bytes // num_ranks) if is_divided else num_bytes


def _moves_per_byte(flow: Flow) -> float:
    return (flow.read + flow.written) / flow.kept if flow.kept else 0.0
