"""A commit as files that everybody reads: safetensors for the weights, a state dict of PyTorch's for the optimizer.

All of it is streamed within a budget of memory, which is checked before anything is written: blocks as they come from
the disk, what lies behind a shard's elements (``pieces.py``), and parameters whose elements are in another order than
that of their indices (channels last), which are turned in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from infinity.engine.deferred import Materializer
from infinity.engine.persistence.optimizer_file import OptimizerFile
from infinity.engine.persistence.pieces import Piece, Pieces, tail_bytes
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.persistence.tensor_files import (
    INDEX_NAME,
    Entry,
    TensorFiles,
    check_output,
    index_of,
    output_directory,
    plan_files,
    sync_files,
    write_text,
)
from infinity.engine.unit import Part, Slot
from infinity.errors import BudgetError
from infinity.io.memory import PAGE_BYTES, round_up

DtypeName = Literal["keep", "fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIXED_BYTES = 32 << 20
"""What code, small objects and the allocator take, whatever is exported; arithmetic on planes included."""

_BLOCKS = 10
"""How many blocks there are at a time: of two planes, of what they give in fp32, of that in another dtype."""

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64 << 10, 4 << 20


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is to be written.

    Attributes:
        entries: the tensors.
        num_bytes: what all files will take.
        needed_bytes: the least memory that would do.
        block_bytes: how much is read at a time.
        whole_bytes: shards of this size are read whole where that saves reading twice.
    """

    entries: Sequence[Entry]
    num_bytes: int
    needed_bytes: int
    block_bytes: int
    whole_bytes: int


class Exporter:
    """Writes one commit's state.

    Args:
        state: the commit's.
        dtype: of floating-point tensors; ``"keep"``: the one of each at full precision.
        computing: export the weights that compute and not those at full precision.
        with_optimizer: write the optimizer's state too.
        max_file_bytes: how many bytes of tensors there are in a file.
        ram_bytes: the most memory to take, beside what the process has taken.

    Raises:
        BudgetError: the memory does not suffice; the message tells how much would.
        ModelError: the format has no word for a dtype.

    Attributes:
        plan: what is to be written.
    """

    def __init__(
        self,
        state: StoredState,
        *,
        dtype: DtypeName = "keep",
        computing: bool = False,
        with_optimizer: bool = False,
        max_file_bytes: int = 5 * 10**9,
        ram_bytes: int = 512 << 20,
    ) -> None:
        self._state = state
        self._computing = computing
        self._dtype = _DTYPES.get(dtype)
        entries = list(self._entries())
        self._files = plan_files(entries, max_file_bytes, tied=state.snapshot.tied)
        self._optimizer = OptimizerFile(state) if with_optimizer else None
        needed_bytes = _FIXED_BYTES + _BLOCKS * _SMALLEST_BLOCK + self._held_bytes()
        if ram_bytes < needed_bytes:
            raise BudgetError(
                f"this export needs {_mib(needed_bytes)} of memory: {_mib(_FIXED_BYTES)} for itself, "
                f"{_mib(_BLOCKS * _SMALLEST_BLOCK)} for blocks, {_mib(self._held_bytes())} for what cannot be "
                f"streamed; got {_mib(ram_bytes)}"
            )
        spare_bytes = ram_bytes - _FIXED_BYTES - self._held_bytes()
        block_bytes = min(spare_bytes // (2 * _BLOCKS) // PAGE_BYTES * PAGE_BYTES, _LARGEST_BLOCK)
        block_bytes = max(block_bytes, _SMALLEST_BLOCK)
        whole_bytes = max(spare_bytes - _BLOCKS * block_bytes, 0) // 2
        files_bytes = sum(file.num_bytes for file in self._files)
        optimizer_bytes = self._optimizer.num_bytes if self._optimizer is not None else 0
        self.plan = ExportPlan(entries, files_bytes + optimizer_bytes, needed_bytes, block_bytes, whole_bytes)

    @property
    def moved_bytes(self) -> int:
        """What ``write`` will tell of as moved, about: bytes of the values, as they are exported."""
        states = self._optimizer.streamed_bytes if self._optimizer is not None else 0
        return sum(entry.num_bytes for entry in self.plan.entries) + states

    def write(self, out: Path, moved: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write all files, then give the directory its name.

        Args:
            out: a directory that does not exist, or is empty.
            moved: told how many bytes have been written, now and then.

        Raises:
            DirectoryError: it is no such directory.
            DiskFullError: there is no room.
            MismatchError: a shard is damaged; nothing is left.
            StorageError: something could not be read or written; nothing is left.
        """
        check_output(out, self.plan.num_bytes)
        pieces = Pieces(self._state, block_bytes=self.plan.block_bytes, whole_bytes=self.plan.whole_bytes)
        with output_directory(out) as directory, torch.inference_mode():
            files = TensorFiles(directory, self._files)
            durable = False
            try:
                self._write_weights(files, pieces, moved)
                durable = True
            finally:
                files.close(durable=durable)
            if len(self._files) > 1:
                index = index_of(self._files, self.plan.entries)
                write_text(directory / INDEX_NAME, json.dumps(index, indent=2) + "\n")
            if self._optimizer is not None:
                self._optimizer.write(directory, pieces, moved)

    def _entries(self) -> Iterator[Entry]:
        """Parameters, tied ones once, and persistent buffers."""
        for part in self._state.parts:
            for slot in part.slots:
                yield Entry(slot.name, self._dtype_of(self._source_dtype(part)), tuple(slot.shape))
        for name in self._state.snapshot.persistent_buffers:
            buffer = self._state.buffers[name]
            yield Entry(name, self._dtype_of(buffer.dtype), tuple(buffer.shape))

    def _source_dtype(self, part: Part) -> torch.dtype:
        whole = self._state.layouts[part.index].weights == "whole"
        return part.compute_dtype if self._computing or whole else part.step_dtype

    def _dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _held_bytes(self) -> int:
        """The most that is in memory at a time beside blocks."""
        with_states = self._optimizer is not None
        small = self._optimizer.small_bytes if self._optimizer is not None else 0
        held = (
            tail_bytes(self._state, part, with_states=with_states) + self._turned_bytes(part)
            for part in self._state.parts
        )
        return round_up(max(held, default=0) + small, PAGE_BYTES)

    def _turned_bytes(self, part: Part) -> int:
        source = self._source_dtype(part)
        item_bytes = source.itemsize + self._dtype_of(source).itemsize
        return max((slot.num_elements * item_bytes for slot in part.slots if not _is_in_order(slot)), default=0)

    def _write_weights(self, files: TensorFiles, pieces: Pieces, moved: Callable[[int], None]) -> None:
        for part in self._state.parts:
            dtype = self._dtype_of(self._source_dtype(part))
            turning: torch.Tensor | None = None
            for piece in pieces.computing(part) if self._computing else pieces.weights(part):
                slot = part.slots[piece.position]
                if _is_in_order(slot):
                    files.write(slot.name, piece.start, piece.values.to(dtype))
                else:
                    turning = _collect(slot, piece, turning)
                    if piece.start + piece.values.numel() == slot.num_elements:
                        files.write(slot.name, 0, turning.as_strided(slot.shape, slot.stride).to(dtype).contiguous())
                        turning = None
                moved(piece.values.numel() * dtype.itemsize)
        for name in self._state.snapshot.persistent_buffers:
            buffer = self._state.buffers[name]
            files.write(name, 0, buffer.to(self._dtype_of(buffer.dtype)))


def export_tensors(
    out: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[tuple[str, torch.Tensor]],
    *,
    tied: Mapping[str, str],
    max_file_bytes: float,
    beside: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write tensors as safetensors files, one in memory at a time.

    Args:
        out: a directory that does not exist, or is empty.
        tensors: by name, real and deferred ones.
        values: of ``values_of(tensors)``; what is left of them after a failure is the caller's.
        tied: further names of some.
        max_file_bytes: how many bytes of tensors there are in a file.
        beside: writes other files into the directory; they are made durable.

    Raises:
        DirectoryError: ``out`` is no such directory.
        DiskFullError: there is no room.
        ModelError: the format has no word for a dtype.
        StorageError: something could not be read or written; nothing is left.
    """
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    planned = plan_files(entries, max_file_bytes, tied=tied)
    check_output(out, sum(file.num_bytes for file in planned))
    with output_directory(out) as directory:
        files, durable = TensorFiles(directory, planned), False
        try:
            for name, value in values:
                files.write(name, 0, value.detach().cpu().contiguous())
            durable = True
        finally:
            files.close(durable=durable)
        if len(planned) > 1:
            write_text(directory / INDEX_NAME, json.dumps(index_of(planned, entries), indent=2) + "\n")
        beside(directory)
        sync_files(directory)


def values_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The values of real and deferred tensors, made one after the other."""
    make = Materializer()
    for name, tensor in tensors.items():
        yield name, make(tensor) if tensor.is_meta else tensor


def _is_in_order(slot: Slot) -> bool:
    """Whether elements lie in the order of their indices."""
    return torch.empty_strided(slot.shape, slot.stride, device="meta").is_contiguous()


def _collect(slot: Slot, piece: Piece, so_far: torch.Tensor | None) -> torch.Tensor:
    whole = torch.empty(slot.num_elements, dtype=piece.values.dtype) if so_far is None else so_far
    whole[piece.start : piece.start + piece.values.numel()] = piece.values
    return whole


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
