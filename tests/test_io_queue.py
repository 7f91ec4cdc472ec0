"""The order of blocks, their merging and their limit: the queue alone, without threads, files or system calls."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_io import buffer
from infinity.errors import ShortTransferError
from infinity.io.backend import DIRECT_ALIGNMENT, Backend, Priority
from infinity.io.files import QueuedFile
from infinity.io.latency import LatencyHistogram
from infinity.io.queue import MAX_SEGMENTS, RequestQueue
from infinity.io.requests import Block, Call, CallBlock, Piece, Request, TransferBlock, Transfers
from infinity.io.threads import ThreadBackend

PAGE = DIRECT_ALIGNMENT
BLOCK = 4 * PAGE
DEMAND, PREFETCH, BACKGROUND = Priority


class Desk:
    """A queue, and short words for what is put in and taken out."""

    def __init__(self, *, block_bytes: int = BLOCK, direct: bool = True, max_bytes: int = 64 * BLOCK) -> None:
        self.queue = RequestQueue(block_bytes=block_bytes, direct=direct, max_bytes=max_bytes)
        self.backend: Backend = ThreadBackend(1)
        self.file = self.another_file()

    def another_file(self) -> QueuedFile:
        async def release(file: QueuedFile) -> bool:
            return False

        return QueuedFile(self.backend, Path("file"), [], release)

    def put(
        self,
        *ranges: tuple[int, int],
        write: bool = False,
        priority: Priority = DEMAND,
        shift: int = 0,
        file: QueuedFile | None = None,
    ) -> Transfers:
        """A request for so many ranges, each its offset and length in bytes, at addresses ``shift`` after a page."""
        pieces = []
        for offset, num_bytes in ranges:
            view = buffer(num_bytes, shift=shift)
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            pieces.append(Piece(file or self.file, offset, view, address))
        request = Transfers(pieces, write=write, priority=priority)
        self.queue.push(request)
        return request

    def call(self, priority: Priority = BACKGROUND) -> Call[int]:
        call = Call(lambda: 1, priority)
        self.queue.push(call)
        return call

    def take(self) -> TransferBlock:
        block = self.queue.take()
        assert isinstance(block, TransferBlock)
        return block

    def ready(self) -> bool:
        return self.queue.ready

    def done(self, block: Block) -> list[Request]:
        if isinstance(block, TransferBlock):
            block.moved_bytes = block.num_bytes
        return self.queue.complete(block)

    def fail(self, block: TransferBlock, moved_bytes: int = 0, error: BaseException | None = None) -> list[Request]:
        block.moved_bytes, block.error = moved_bytes, error or OSError(errno.EIO, "no")
        return self.queue.complete(block)

    def taken(self) -> list[tuple[int, int]]:
        """Take and complete, one at a time, to the end: offsets and lengths."""
        blocks = []
        while (block := self.queue.take()) is not None:
            assert isinstance(block, TransferBlock)
            blocks.append((block.position, block.num_bytes))
            self.done(block)
        return blocks


# Order


async def test_the_most_urgent_first_then_who_came_first() -> None:
    desk = Desk()
    for index, priority in enumerate((BACKGROUND, PREFETCH, DEMAND, BACKGROUND, PREFETCH, DEMAND)):
        desk.put((10 * index * BLOCK, BLOCK), priority=priority)
    assert [offset // (10 * BLOCK) for offset, _ in desk.taken()] == [2, 5, 1, 4, 0, 3]
    assert len(desk.queue) == 0
    assert not desk.ready()


async def test_of_equal_urgency_the_direction_with_fewer_blocks_running() -> None:
    desk = Desk()
    desk.put((0, 8 * BLOCK))
    desk.put((100 * BLOCK, 8 * BLOCK), write=True)
    blocks = [desk.take() for _ in range(6)]
    assert [block.write for block in blocks] == [False, True, False, True, False, True]
    desk.done(blocks[1])
    desk.done(blocks[3])
    assert [desk.take().write for _ in range(3)] == [True, True, False]
    urgent = desk.put((200 * BLOCK, BLOCK), priority=DEMAND)  # no more urgent than the other reads, which came first
    assert desk.take().segments[0].request is not urgent


async def test_urgency_goes_before_fairness() -> None:
    desk = Desk()
    desk.put((0, 8 * BLOCK), write=True, priority=BACKGROUND)
    desk.put((100 * BLOCK, 8 * BLOCK), priority=DEMAND)
    assert [desk.take().write for _ in range(9)] == [False] * 8 + [True]


async def test_a_call_waits_for_its_turn_among_writes_and_holds_up_no_read() -> None:
    desk = Desk()
    desk.put((0, BLOCK), write=True, priority=BACKGROUND)
    call = desk.call()
    desk.put((10 * BLOCK, BLOCK), write=True, priority=BACKGROUND)
    desk.put((20 * BLOCK, 2 * BLOCK), priority=BACKGROUND)
    order = [desk.queue.take() for _ in range(5)]
    assert [isinstance(block, CallBlock) or (block.position if block else None) for block in order] == [
        0,
        20 * BLOCK,
        True,
        10 * BLOCK,
        21 * BLOCK,
    ]
    assert isinstance(order[2], CallBlock)
    assert desk.queue.complete(order[2]) == [call]


# The limit


async def test_no_more_is_running_than_allowed_and_nobody_passes_who_waits() -> None:
    desk = Desk(max_bytes=2 * BLOCK + PAGE)
    desk.put((0, 3 * BLOCK))
    desk.put((10 * BLOCK, PAGE))
    first, second = desk.take(), desk.take()
    assert desk.queue.take() is None  # the small one would fit, but it is not its turn
    assert not desk.ready()
    assert len(desk.queue) == 2
    desk.done(first)
    assert desk.ready()
    assert desk.take().position == 2 * BLOCK
    assert desk.take().position == 10 * BLOCK
    desk.done(second)
    assert desk.queue.take() is None


async def test_what_fits_nowhere_goes_alone() -> None:
    desk = Desk(max_bytes=BLOCK // 2)
    desk.put((0, 2 * BLOCK))
    block = desk.take()
    assert block.num_bytes == BLOCK
    assert desk.queue.take() is None
    desk.call(DEMAND)
    assert isinstance(desk.queue.take(), CallBlock)  # it has no bytes
    assert desk.queue.take() is None
    desk.done(block)
    assert desk.take().num_bytes == BLOCK


async def test_a_merged_block_keeps_to_the_limit_too() -> None:
    desk = Desk(max_bytes=BLOCK + 2 * PAGE)
    desk.put((100 * BLOCK, BLOCK))
    for index in range(4):
        desk.put((index * PAGE, PAGE))
    desk.take()
    assert desk.take().num_bytes == 2 * PAGE
    assert desk.queue.take() is None


async def test_dropping_who_waits_lets_the_next_one_in() -> None:
    desk = Desk(max_bytes=BLOCK + PAGE)
    desk.put((0, BLOCK))
    waiting = desk.put((10 * BLOCK, BLOCK))
    desk.put((20 * BLOCK, PAGE))
    desk.take()
    assert not desk.ready()
    assert desk.queue.drop(waiting)
    assert desk.take().position == 20 * BLOCK


# Merging


async def test_neighbours_go_together_in_any_order_of_arrival() -> None:
    desk = Desk()
    for page in (0, 3, 1, 7, 2, 6, 4):
        desk.put((page * PAGE, PAGE))
    block = desk.take()
    assert (block.position, block.num_bytes) == (0, BLOCK)
    assert [segment.position // PAGE for segment in block.segments] == [0, 1, 2, 3]
    assert [segment.address % PAGE for segment in block.segments] == [0] * 4
    assert [request.ended for request in desk.done(block)] == [True] * 4
    assert desk.taken() == [(7 * PAGE, PAGE), (6 * PAGE, PAGE), (4 * PAGE, PAGE)]  # who ends before goes with nobody


async def test_pieces_of_a_batch_go_together_whatever_their_order() -> None:
    desk = Desk()
    request = desk.put((3 * PAGE, PAGE), (PAGE, PAGE), (9 * PAGE, PAGE), (2 * PAGE, PAGE))
    block = desk.take()
    assert (block.position, block.num_bytes, len(block.segments)) == (PAGE, 3 * PAGE, 3)
    assert desk.done(block) == []
    assert desk.done(desk.take()) == [request]
    assert request.num_whole == 4


async def test_a_block_is_filled_from_the_head_of_a_large_neighbour() -> None:
    desk = Desk()
    desk.put((0, PAGE))
    desk.put((PAGE, 2 * BLOCK))
    assert desk.taken() == [(0, BLOCK), (BLOCK, BLOCK), (2 * BLOCK, PAGE)]


async def test_the_tail_of_a_large_request_takes_its_neighbour() -> None:
    desk = Desk()
    desk.put((0, BLOCK + PAGE))
    desk.put((BLOCK + PAGE, PAGE + 5))
    assert desk.taken() == [(0, BLOCK), (BLOCK, 2 * PAGE + 5)]


@pytest.mark.parametrize("what", ["file", "write", "priority", "gap", "misaligned", "ragged"])
async def test_only_what_belongs_together_is_merged(what: str) -> None:
    desk = Desk()
    end = PAGE - 1 if what == "ragged" else PAGE
    desk.put((0, end))
    desk.put(
        (end + (PAGE if what == "gap" else 0), PAGE),
        write=what == "write",
        priority=PREFETCH if what == "priority" else DEMAND,
        shift=8 if what == "misaligned" else 0,
        file=desk.another_file() if what == "file" else None,
    )
    assert len(desk.taken()) == 2


async def test_buffered_io_merges_at_any_byte() -> None:
    desk = Desk(direct=False)
    desk.put((1, 10), shift=3)
    desk.put((11, 20), shift=7)
    block = desk.take()
    assert (block.position, block.num_bytes, block.misaligned) == (1, 30, False)


async def test_two_who_read_the_same_bytes_both_get_them() -> None:
    desk = Desk()
    desk.put((0, PAGE))
    for _ in range(2):
        desk.put((PAGE, PAGE))
    desk.put((0, PAGE))
    assert sum(num_bytes for _, num_bytes in desk.taken()) == 4 * PAGE


async def test_a_block_has_no_more_segments_than_one_call_takes() -> None:
    desk = Desk(block_bytes=2 * MAX_SEGMENTS * 8, direct=False)
    for index in range(MAX_SEGMENTS + 1):
        desk.put((index * 8, 8))
    assert [len(desk.take().segments) for _ in range(2)] == [MAX_SEGMENTS, 1]


async def test_views_are_cut_at_any_byte() -> None:
    desk = Desk()
    sizes = [PAGE, 2 * PAGE, PAGE]
    requests = [desk.put((offset, size)) for offset, size in zip((0, PAGE, 3 * PAGE), sizes, strict=True)]
    block = desk.take()
    for index, segment in enumerate(block.segments):
        segment.view[:] = bytes([index + 1]) * segment.num_bytes
    whole = b"".join(bytes(segment.view) for segment in block.segments)
    for start in (0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, BLOCK - 1):
        for num_bytes in (1, PAGE, PAGE + 1, BLOCK):
            views = block.views(start, min(num_bytes, BLOCK - start))
            assert b"".join(views) == whole[start : start + num_bytes]
            assert all(len(view) for view in views)
    assert [request.next_bytes(BLOCK) if not request.exhausted else 0 for request in requests] == [0, 0, 0]


# Errors and cancellations in merged blocks


async def test_a_failed_merged_block_is_taken_apart() -> None:
    desk = Desk()
    requests = [desk.put((page * PAGE, PAGE)) for page in range(4)]
    assert desk.fail(desk.take(), PAGE + 512) == [requests[0]]
    by_position = {block.position: block for block in (desk.take() for _ in range(3))}
    assert {position: block.num_bytes for position, block in by_position.items()} == {
        PAGE + 512: PAGE - 512,
        2 * PAGE: PAGE,
        3 * PAGE: PAGE,
    }
    assert desk.fail(by_position[2 * PAGE]) == [requests[2]]
    assert desk.done(by_position[PAGE + 512]) == [requests[1]]
    assert desk.done(by_position[3 * PAGE]) == [requests[3]]
    assert [request.error() is None for request in requests] == [True, True, False, True]
    assert "at 8192" in str(requests[2].error())
    assert len(desk.queue) == 0


async def test_what_is_put_back_goes_before_those_behind_it() -> None:
    desk = Desk()
    desk.put((0, PAGE))
    desk.put((PAGE, PAGE))
    block = desk.take()
    desk.put((10 * BLOCK, PAGE))
    desk.fail(block)
    assert [desk.take().position for _ in range(3)][2] == 10 * BLOCK


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_cancelled_part_of_a_failed_block_is_not_repeated(when: str) -> None:
    desk = Desk()
    first, second = desk.put((0, PAGE)), desk.put((PAGE, PAGE))
    block = desk.take()
    if when == "before":
        assert not desk.queue.drop(first)
        assert desk.fail(block) == [first]
    else:
        assert desk.fail(block) == []
        assert desk.queue.drop(first)
    assert not desk.queue.drop(first)
    block = desk.take()
    assert block.position == PAGE
    assert desk.done(block) == [second]
    assert second.error() is None


async def test_an_error_drops_the_rest_but_not_what_is_put_back() -> None:
    """So the bytes that an error reports do not depend on which block came first."""
    desk = Desk()
    desk.put((0, PAGE))
    large = desk.put((PAGE, 3 * BLOCK))
    merged, other = desk.take(), desk.take()
    assert desk.fail(merged) == []
    assert desk.fail(other, PAGE, EOFError()) == []
    by_position = {block.position: block for block in (desk.take(), desk.take())}
    assert desk.queue.take() is None
    assert desk.done(by_position[PAGE]) == [large]
    error = large.error()
    assert isinstance(error, ShortTransferError)
    assert (error.expected_bytes, error.got_bytes) == (3 * BLOCK, 3 * PAGE + PAGE)


# Everything at random


class Model:
    """Random work on a queue, and what must hold of it whatever happens."""

    def __init__(self, seed: int, *, direct: bool, max_bytes: int) -> None:
        self.random = random.Random(seed)
        self.direct = direct
        self.max_bytes = max_bytes
        self.desk = Desk(direct=direct, max_bytes=max_bytes)
        self.files = [self.desk.file, self.desk.another_file()]
        self.alive: set[Transfers] = set()
        self.dropped: set[Transfers] = set()
        self.moved: dict[Piece, list[tuple[int, int]]] = {}
        self.running: list[TransferBlock] = []

    def push(self) -> None:
        unit = self.random.choice([PAGE, PAGE, 100])
        ranges = [
            (self.random.randrange(12) * unit, self.random.randrange(1, 10) * unit)
            for _ in range(self.random.choice([1, 1, 3]))
        ]
        request = self.desk.put(
            *ranges,
            write=self.random.random() < 0.5,
            priority=self.random.choice([DEMAND, BACKGROUND]),
            shift=self.random.choice([0, 0, 8]),
            file=self.random.choice(self.files),
        )
        self.alive.add(request)

    def take(self) -> None:
        ready = self.desk.ready()
        block = self.desk.queue.take()
        assert (block is not None) == ready
        if block is None:
            return
        assert isinstance(block, TransferBlock)
        position = block.position
        for segment in block.segments:
            assert segment.position == position
            assert segment.num_bytes > 0
            assert (segment.piece.file, segment.request.write) == (block.file, block.write)
            assert segment.request.priority == block.segments[0].request.priority
            assert segment.request not in self.dropped
            if len(block.segments) > 1 and self.direct:
                assert (segment.address - segment.position) % PAGE == 0
                assert segment is block.segments[0] or segment.position % PAGE == 0
            position += segment.num_bytes
        assert block.num_bytes == position - block.position <= BLOCK
        assert block.misaligned == (self.direct and (block.segments[0].address - block.position) % PAGE != 0)
        self.running.append(block)
        total = sum(block.num_bytes for block in self.running)
        assert total <= self.max_bytes or len(self.running) == 1

    def complete(self) -> None:
        if not self.running:
            return
        block = self.running.pop(self.random.randrange(len(self.running)))
        fate = self.random.random()
        segments = [(segment, segment.start, segment.stop) for segment in block.segments]
        if fate < 0.75:
            block.moved_bytes = block.num_bytes
        else:
            block.moved_bytes, block.error = self.random.randrange(block.num_bytes), OSError(errno.EIO, "no")
        moved_bytes = block.moved_bytes
        for segment, start, stop in segments:
            part = min(moved_bytes, stop - start)
            moved_bytes -= part
            if part:
                self.moved.setdefault(segment.piece, []).append((start, start + part))
        self.end(self.desk.queue.complete(block))

    def drop(self) -> None:
        if self.alive:
            request = self.random.choice(sorted(self.alive, key=lambda request: request.arrival))
            self.dropped.add(request)
            if self.desk.queue.drop(request):
                self.end([request])

    def end(self, ended: list[Request]) -> None:
        assert len(set(ended)) == len(ended)
        for request in ended:
            assert isinstance(request, Transfers)
            assert request.ended
            self.alive.remove(request)  # exactly once
            if request not in self.dropped and request.failure is None:
                assert request.num_whole == len(request._pieces)
                for piece in request._pieces:
                    reached = 0
                    for start, stop in sorted(self.moved[piece]):
                        assert start == reached  # each byte once
                        reached = stop
                    assert reached == len(piece.view)

    def settle(self) -> None:
        for _ in range(100_000):
            self.take()
            self.complete()
            if not self.alive:
                break
        assert not self.alive
        assert not self.running
        assert len(self.desk.queue) == 0


@given(seed=st.integers(0, 2**32), direct=st.booleans(), max_blocks=st.sampled_from([0.5, 1, 2.5, 100]))
@settings(max_examples=150, deadline=None, derandomize=True)
async def test_every_byte_once_and_every_request_ends_once(seed: int, direct: bool, max_blocks: float) -> None:
    model = Model(seed, direct=direct, max_bytes=int(max_blocks * BLOCK))
    steps: list[Callable[[], None]] = [model.push, model.take, model.take, model.complete, model.drop]
    for _ in range(60):
        model.random.choices(steps, [4, 3, 3, 4, 1])[0]()
    model.settle()


# Figures


def test_histograms_add_up_and_compare() -> None:
    one, two = LatencyHistogram(), LatencyHistogram()
    assert one == two
    for seconds in (1e-3, 2e-3, 4e-3):
        one.add(seconds)
    assert one != two
    assert len(one) == 3
    before = one.copy()
    one.add(1.0)
    assert len(one.since(before)) == 1
    assert one.since(before).percentile(50) == pytest.approx(1.0, rel=0.06)
    assert before.percentile(50) == pytest.approx(2e-3, rel=0.06)
    assert before + one.since(before) == one
