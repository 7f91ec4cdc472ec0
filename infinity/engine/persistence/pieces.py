"""The values of a part as they come from the disk, piece by piece: what exports a state larger than memory.

A part is gone through once, in the order of its elements, whatever way it is stored; pieces of two planes are joined,
codes are decoded. What lies behind the elements (exceptions, scales) is read first. No more is in memory than blocks,
and that; or the shard that has such a tail, where it is small, which saves reading its extents twice.

A piece is void once the next is asked for. What is wrong with a shard is raised at the end of each of its extents, so
who uses pieces must be able to drop what was made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from infinity.engine.codecs import BLOCK_ELEMENTS, Codec
from infinity.engine.persistence.snapshot import StateLayout, torch_dtype
from infinity.engine.persistence.stored_state import Source, StoredState
from infinity.engine.planes import ExceptionTable, join, join_exactly
from infinity.engine.states import Packed
from infinity.engine.unit import MASTER, PARAM, RESIDUAL, UPPER, Part, state_kind
from infinity.errors import ManifestError
from infinity.io.memory import as_bytes
from infinity.store.shard import ShardKey
from infinity.store.stored import BLOCK_BYTES

_ELEMENTS_AT_ONCE = 1 << 20


class Piece(NamedTuple):
    """Consecutive elements of a parameter, in the order in which they lie in memory.

    Attributes:
        position: of its slot.
        start: the first of them.
        values: one dimension; void once the next piece is asked for.
    """

    position: int
    start: int
    values: torch.Tensor


class _Flat(NamedTuple):
    """Consecutive elements of a part."""

    start: int
    values: torch.Tensor


class Pieces:
    """Goes through parts of a commit, of all ranks that have made it.

    Args:
        state: the commit's.
        block_bytes: how much is read at a time; whole pages.
        whole_bytes: shards with a tail are held whole up to this size.
    """

    def __init__(self, state: StoredState, *, block_bytes: int = BLOCK_BYTES, whole_bytes: int = 0) -> None:
        self._state = state
        self._block_bytes = block_bytes
        self._whole_bytes = whole_bytes

    def weights(self, part: Part) -> Iterator[Piece]:
        """The weights of a part at full precision, in the order of its slots.

        Raises:
            MismatchError: the bytes of the extent that has just ended are not those that were written.
            StorageError: a shard could not be read.
        """
        for source in self._state.sources(part):
            yield from _from(source, self._of(source).weights(source.part))

    def computing(self, part: Part) -> Iterator[Piece]:
        """The weights of a part in the dtype that computes; errors as for ``weights``."""
        for source in self._state.sources(part):
            yield from _from(source, self._of(source).computing(source.part))

    def states(self, part: Part, name: str) -> Iterator[Piece]:
        """One of the optimizer's states, of the slots that have it; errors as for ``weights``."""
        having = set(self._state.layouts[part.index].states[name].slots)
        for source in self._state.sources(part):
            layout = source.state.layouts[source.part.index].states.get(name)
            there = frozenset(layout.slots if layout is not None else ())
            if layout is not None:
                yield from _from(source, self._of(source).states(source.part, name))
            for position in sorted(having & set(source.starts) - there):  # of one element, which is no shard
                slot = source.part.slots[position]
                value = source.state.small_state(slot.name).get(name)
                if not isinstance(value, torch.Tensor) or value.numel() != slot.num_elements:
                    raise ManifestError(
                        f"commit cannot be used: no state {name} of parameter {slot.name}, which other ranks have",
                        path=source.state.commit.path,
                    )
                yield Piece(position, source.starts[position], value.reshape(-1))

    def _of(self, source: Source) -> _OwnPieces:
        return _OwnPieces(source.state, block_bytes=self._block_bytes, whole_bytes=self._whole_bytes)


def _from(source: Source, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Pieces of whole parameters, of those that are taken from there."""
    for position, start, values in pieces:
        if position in source.starts:
            yield Piece(position, source.starts[position] + start, values)


class _OwnPieces:
    """Goes through what one rank has of parts; as ``Pieces``, whose ``start`` counts from the rank's first element."""

    def __init__(self, state: StoredState, *, block_bytes: int, whole_bytes: int) -> None:
        self._state = state
        self._block_bytes = block_bytes
        self._whole_bytes = whole_bytes

    def weights(self, part: Part) -> Iterator[Piece]:
        stored = self._state.layouts[part.index].weights
        if stored == "planes":
            flat = self._joined(part)
        else:
            kind, dtype = (MASTER, part.step_dtype) if stored == "master" else (PARAM, part.compute_dtype)
            flat = self._flat(part, part.key(kind), dtype)
        return _by_slot(part, flat)

    def computing(self, part: Part) -> Iterator[Piece]:
        return _by_slot(part, self._flat(part, part.key(PARAM), part.compute_dtype))

    def states(self, part: Part, name: str) -> Iterator[Piece]:
        layout: StateLayout = self._state.layouts[part.index].states[name]
        key, format_, positions = (
            part.key(state_kind(name)),
            self._state.state_format_of(part, layout),
            set(layout.slots),
        )
        if isinstance(format_, Packed):
            pieces = self._decoded(part, key, format_)
        else:
            pieces = _by_slot(part, self._flat(part, key, torch_dtype(layout.dtype)))
        return (piece for piece in pieces if piece.position in positions)

    def _flat(self, part: Part, key: ShardKey, dtype: torch.dtype) -> Iterator[_Flat]:
        return _as_elements(self._blocks(key, 0, part.num_bytes(dtype)), dtype)

    def _blocks(self, key: ShardKey, start: int, stop: int | None) -> Iterator[memoryview]:
        return self._state.commit.blocks(key, start, stop, block_bytes=self._block_bytes)

    def _with_tail(self, key: ShardKey, stop: int) -> tuple[torch.Tensor, Iterator[memoryview]]:
        """What is in a shard from ``stop`` on, ``uint8``; and what is before."""
        num_bytes = self._state.commit.shard(key).num_bytes
        if num_bytes <= self._whole_bytes:
            whole = self._state.commit.read(key)
            before = as_bytes(whole[:stop])
            step = self._block_bytes
            return whole[stop:], (before[start : start + step] for start in range(0, stop, step))
        tail, done = torch.empty(num_bytes - stop, dtype=torch.uint8), 0
        for block in self._blocks(key, stop, None):
            as_bytes(tail)[done : done + len(block)] = block
            done += len(block)
        return tail, self._blocks(key, 0, stop)

    def _joined(self, part: Part) -> Iterator[_Flat]:
        tail, before = self._with_tail(part.key(RESIDUAL), 2 * part.num_elements)
        table = ExceptionTable(tail)
        if not table.is_sound(part.num_elements):
            raise ManifestError(f"shard {part.key(RESIDUAL)} holds no residuals", path=self._state.commit.path)
        exceptions = table.read()
        is_wide = part.key(UPPER) in self._state.commit
        upper = self._flat(part, part.key(UPPER if is_wide else PARAM), torch.int16)
        out = torch.empty(min(self._block_bytes // 2, part.num_elements), dtype=torch.float32)
        for start, first, low in _together(upper, _as_elements(before, torch.int16)):
            values = out[: low.numel()]
            if is_wide:
                join_exactly(first, low, values)
            else:
                within = exceptions.within(start, start + low.numel())
                join(first.view(torch.bfloat16), low, within, values)
            yield _Flat(start, values)

    def _decoded(self, part: Part, key: ShardKey, format_: Packed) -> Iterator[Piece]:
        places, size = format_.places_of(part), format_.codec.code_bytes
        stop = part.num_elements * size
        tail, before = self._with_tail(key, stop)
        # A code is as many elements as it has bytes, so that pieces may end anywhere.
        codes = _as_elements(before, torch.uint8 if size == 1 else torch.int16)
        decode: _Decoder | None = None
        for position, start, values in _by_slot(part, codes):
            place = places[position]
            if not place.is_packed:
                continue
            if start == 0:
                decode = _Decoder(format_.codec, _behind(tail, place.scales, stop), self._block_bytes)
            assert decode is not None
            is_last = start + values.numel() == part.slots[position].num_elements
            for first, decoded in decode(values.view(torch.uint8), is_last=is_last):
                yield Piece(position, first, decoded)
        for position, place in enumerate(places):
            if not place.is_packed:
                yield Piece(position, 0, _behind(tail, place.codes, stop))


def tail_bytes(state: StoredState, part: Part, *, with_states: bool) -> int:
    """The largest tail of any of a part's shards: what ``Pieces`` holds of it beside blocks."""
    sources = state.sources(part)
    return max((_tail_bytes(each.state, each.part, with_states=with_states) for each in sources), default=0)


def _tail_bytes(state: StoredState, part: Part, *, with_states: bool) -> int:
    layout = state.layouts[part.index]
    tails = [ExceptionTable.num_bytes(part.num_elements) if layout.weights == "planes" else 0]
    for each in layout.states.values() if with_states else ():
        format_ = state.state_format_of(part, each)
        if isinstance(format_, Packed):
            tails.append(format_.num_bytes(part) - part.num_elements * format_.codec.code_bytes)
    return max(tails)


class _Decoder:
    """Decodes the codes of one slot, which come in pieces that end anywhere."""

    def __init__(self, codec: Codec, scales: torch.Tensor, block_bytes: int) -> None:
        self._codec = codec
        self._scales = scales
        num_blocks = max(min(block_bytes // codec.code_bytes, _ELEMENTS_AT_ONCE) // BLOCK_ELEMENTS, 1)
        self._codes = torch.empty(num_blocks * BLOCK_ELEMENTS * codec.code_bytes, dtype=torch.uint8)
        self._out = torch.empty(num_blocks * BLOCK_ELEMENTS, dtype=torch.float32)
        self._filled = 0
        self._start = 0

    def __call__(self, codes: torch.Tensor, *, is_last: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """What can be decoded now, with the number of its first element."""
        while codes.numel():
            room = min(codes.numel(), self._codes.numel() - self._filled)
            self._codes[self._filled : self._filled + room].copy_(codes[:room])
            self._filled, codes = self._filled + room, codes[room:]
            if self._filled == self._codes.numel() or (is_last and not codes.numel()):
                yield self._flush()

    def _flush(self) -> tuple[int, torch.Tensor]:
        count, start = self._filled // self._codec.code_bytes, self._start
        out = self._out[:count]
        first = self._codec.num_scales(start)
        scales = self._scales[first : first + self._codec.num_scales(count)]
        self._codec.decode(self._codes[: self._filled], scales, out)
        self._filled, self._start = 0, start + count
        return start, out


def _behind(tail: torch.Tensor, place: slice, stop: int) -> torch.Tensor:
    """fp32 numbers in the tail of a packed shard, which begins at byte ``stop``."""
    return tail[place.start - stop : place.stop - stop].view(torch.float32)


def _as_elements(blocks: Iterator[memoryview], dtype: torch.dtype) -> Iterator[_Flat]:
    start = 0
    for block in blocks:
        values = torch.frombuffer(block, dtype=dtype)
        yield _Flat(start, values)
        start += values.numel()


def _together(*streams: Iterator[_Flat]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Two streams of the same elements, cut where either is."""
    first_stream, second_stream = streams
    first = second = torch.empty(0)
    start = 0
    while True:
        if not first.numel():
            first = next(first_stream, _Flat(0, first)).values
        if not second.numel():
            second = next(second_stream, _Flat(0, second)).values
        count = min(first.numel(), second.numel())
        if not count:
            return
        yield start, first[:count], second[:count]
        first, second, start = first[count:], second[count:], start + count


def _by_slot(part: Part, stream: Iterator[_Flat]) -> Iterator[Piece]:
    """What of a part's elements are parameters'."""
    position = 0
    for start, values in stream:
        stop = start + values.numel()
        while position < len(part.slots):
            slot = part.slots[position]
            first, last = max(slot.offset, start), min(slot.offset + slot.num_elements, stop)
            if first < last:
                yield Piece(position, first - slot.offset, values[first - start : last - start])
            if slot.offset + slot.num_elements > stop:
                break
            position += 1
