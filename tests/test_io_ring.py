"""The ring below the io_uring backend, and what only that backend has; the rest of it is in the suites of all."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakes_io
import infinity.io.ring as module
import infinity.io.uring as uring
from fakes_io import BLOCK_BYTES, Gate, HookedSyscalls, Operation, buffer, fail, noise, until
from infinity.errors import ShortTransferError, StorageError
from infinity.io.backend import DIRECT_ALIGNMENT, Priority, Transfer
from infinity.io.memory import allocate
from infinity.io.ring import Ring, refusal
from infinity.io.uring import UringBackend

PAGE = DIRECT_ALIGNMENT

needs_ring = pytest.mark.skipif(fakes_io.ring_refusal() is not None, reason=f"no io_uring: {fakes_io.ring_refusal()}")
property_settings = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def ring() -> Iterator[Ring]:
    before = fakes_io.resources()
    ring = Ring(5)
    yield ring
    ring.close()
    assert fakes_io.resources() == before


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(noise(16 * PAGE))
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    yield descriptor
    os.close(descriptor)


class Memory:
    """Bytes with an address."""

    def __init__(self, num_bytes: int) -> None:
        self._tensor = allocate(-(-num_bytes // PAGE) * PAGE)
        self.address = self._tensor.data_ptr()
        self.view = memoryview(self._tensor.numpy())  # type: ignore[arg-type]


def finish(ring: Ring, num_operations: int) -> dict[int, int]:
    results: dict[int, int] = {}
    while len(results) < num_operations:
        results.update(ring.wait())
    return results


# Operations


runs = st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4)
batches = st.lists(st.tuples(st.booleans(), st.integers(0, 20 * PAGE), runs), min_size=1, max_size=5)


@needs_ring
@given(batches=st.lists(batches, min_size=1, max_size=6))
@property_settings
def test_any_batch_of_operations(ring: Ring, file: int, batches: list[list[tuple[bool, int, list[int]]]]) -> None:
    """Against a model in memory; operations of a batch are kept apart by as many files."""
    memory = Memory(5 * 12 * PAGE)
    os.ftruncate(file, 0)
    model = bytearray()
    token = 0
    for batch in batches:
        write = batch[0][0]
        used: list[tuple[int, int, list[int]]] = []
        stop = 0
        for index, (_, offset, lengths) in enumerate(batch):
            offset = max(offset, stop)  # disjoint: they have no order
            stop = offset + sum(lengths)
            token += 1
            address, segments = memory.address + index * 12 * PAGE, []
            for length in lengths:
                segments.append((address, length))
                address += length
            content = noise(sum(lengths), token)
            memory.view[index * 12 * PAGE : index * 12 * PAGE + len(content)] = content
            ring.transfer(token, file, offset, segments, write=write)
            used.append((token, offset, lengths))
        results = finish(ring, len(used))
        for index, (number, offset, lengths) in enumerate(used):
            got = memory.view[index * 12 * PAGE : index * 12 * PAGE + sum(lengths)]
            if write:
                assert results[number] == sum(lengths)
                model.extend(bytes(max(0, offset + sum(lengths) - len(model))))
                model[offset : offset + sum(lengths)] = noise(sum(lengths), number)
            else:
                there = model[offset : offset + sum(lengths)]
                assert results[number] == len(there)
                assert got[: len(there)] == there
    assert os.pread(file, len(model) + 1, 0) == model


@needs_ring
def test_results_are_those_of_the_system(ring: Ring, file: int) -> None:
    memory = Memory(PAGE)
    here = [(memory.address, PAGE)]
    ring.transfer(1, file, 15 * PAGE + 100, here, write=False)
    ring.transfer(2, file, 16 * PAGE, here, write=False)
    ring.transfer(3, 9999, 0, here, write=False)
    ring.transfer(2**60, file, 0, [(8, PAGE), (16, PAGE)], write=False)  # nobody's memory
    results = finish(ring, 4)
    assert results == {1: PAGE - 100, 2: 0, 3: -errno.EBADF, 2**60: -errno.EFAULT}


@needs_ring
def test_more_than_fits_is_a_bug_and_not_an_overwritten_operation(file: int) -> None:
    memory, ring = Memory(PAGE), Ring(3)
    for token in (1, 2, 3, 4):
        ring.transfer(token, file, 0, [(memory.address, PAGE)], write=False)
    with pytest.raises(AssertionError):
        ring.transfer(5, file, 0, [(memory.address, PAGE)], write=False)
    ring.close()


# Waking and closing


@needs_ring
def test_a_wake_is_never_lost(ring: Ring, file: int) -> None:
    memory = Memory(PAGE)
    for _ in range(3):
        ring.wake()
    assert ring.wait() == []  # three before it are one
    thread = threading.Timer(0.02, ring.wake)
    thread.start()
    assert ring.wait() == []
    thread.join()
    ring.transfer(1, file, 0, [(memory.address, PAGE)], write=False)
    assert finish(ring, 1) == {1: PAGE}


@needs_ring
def test_close_waits_for_what_is_in_flight() -> None:
    before = fakes_io.resources()
    memory, (reader, writer) = Memory(PAGE), os.pipe()
    started, closed = threading.Event(), threading.Event()

    def own() -> None:
        ring = Ring(2)
        ring.transfer(1, reader, 0, [(memory.address, PAGE)], write=False)
        ring.wake()
        assert ring.wait() == []
        started.set()
        ring.close()
        closed.set()

    thread = threading.Thread(target=own)
    thread.start()
    assert started.wait(60)
    assert not closed.wait(0.05)
    os.write(writer, b"late")
    thread.join(60)
    assert closed.is_set()
    assert bytes(memory.view[:4]) == b"late"
    os.close(reader)
    os.close(writer)
    assert fakes_io.resources() == before


# What the kernel may answer


class Kernel:
    """The real libc, some of whose answers are replaced."""

    def __init__(self, number: int, answers: list[int | None], *, most: int = 1 << 30) -> None:
        self._libc = module._libc
        self._number = number
        self._answers = answers
        self._most = most
        self.num_begun: list[int] = []

    def syscall(self, number: int, *args: Any) -> int:
        if number != self._number:
            return int(self._libc.syscall(number, *args))
        code = self._answers.pop(0) if self._answers else None
        if code is not None:
            ctypes.set_errno(code)
            return -1
        if number == module._SYS_ENTER:
            args = (args[0], min(args[1], self._most), *args[2:])
        answer = int(self._libc.syscall(number, *args))
        self.num_begun.append(answer)
        return answer


@needs_ring
def test_an_interrupted_wait_and_a_kernel_short_of_memory(
    ring: Ring, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(4 * PAGE)
    kernel = Kernel(module._SYS_ENTER, [errno.EINTR, errno.EAGAIN, errno.EINTR, errno.EBUSY], most=1)
    monkeypatch.setattr(module, "_libc", kernel)
    for index in range(4):
        ring.transfer(index + 1, file, index * PAGE, [(memory.address + index * PAGE, PAGE)], write=False)
    assert finish(ring, 4) == dict.fromkeys((1, 2, 3, 4), PAGE)
    assert kernel.num_begun[:4] == [1, 1, 1, 1]  # one at a time, and none twice
    assert memory.view[: 4 * PAGE] == noise(16 * PAGE)[: 4 * PAGE]


@needs_ring
def test_what_has_ended_is_handed_out_though_nothing_more_can_begin(
    ring: Ring, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(PAGE)
    ring.transfer(1, file, 0, [(memory.address, PAGE)], write=False)
    ring._enter()
    ring.transfer(2, file, PAGE, [(memory.address, PAGE)], write=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_libc", Kernel(module._SYS_ENTER, [errno.EAGAIN] * 3))
        assert ring.wait() == [(1, PAGE)]
    assert finish(ring, 1) == {2: PAGE}


@needs_ring
def test_an_error_of_the_ring_itself_is_raised(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_libc", Kernel(module._SYS_ENTER, [errno.EBADF]))
        with pytest.raises(OSError, match="Bad file descriptor"):
            ring.wait()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_a_refused_ring_leaves_nothing(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fakes_io.resources()
    monkeypatch.setattr(module, "_libc", Kernel(module._SYS_SETUP, [code]))
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        Ring(4)
    assert caught.value.errno == code
    assert fakes_io.resources() == before


@needs_ring
def test_half_a_ring_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fakes_io.resources()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_FEATURES", 1 << 31)
        with pytest.raises(OSError, match="too old"):
            Ring(4)

    def no_more(initial: int) -> int:
        raise fail(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            Ring(4)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_READ", 250)  # an operation that this kernel does not know
        with pytest.raises(OSError, match="Invalid argument"):
            Ring(4)
    assert fakes_io.resources() == before


@pytest.mark.parametrize(
    ("code", "disabled", "words"),
    [
        (errno.EPERM, None, "seccomp filter of a container"),
        (errno.EPERM, "0", "seccomp filter of a container"),
        (errno.EPERM, "2", "kernel.io_uring_disabled=2"),
        (errno.ENOSYS, None, "Linux 5.7 or later"),
        (errno.EINVAL, None, "Linux 5.7 or later"),
        (errno.ENOMEM, None, "ulimit -l"),
        (errno.EMFILE, None, "ulimit -n"),
        (errno.EIO, None, "Input/output error"),
    ],
)
def test_refusals_say_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, disabled: str | None, words: str
) -> None:
    monkeypatch.setattr(module, "_DISABLED", tmp_path / "io_uring_disabled")
    if disabled is not None:
        (tmp_path / "io_uring_disabled").write_text(f"{disabled}\n")
    assert words in refusal(fail(code))


# The backend


@needs_ring
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_for_real(tmp_path: Path, direct: bool, seed: int) -> None:
    """No hook below: operations go straight to the kernel. Everything at once, some of it cancelled."""
    if direct and not fakes_io.supports_direct(tmp_path):
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    before = fakes_io.resources()
    choose = random.Random(seed)
    backend = UringBackend(4, 4 * PAGE, direct)
    file = await backend.open_file(tmp_path / "file", create=True)
    await backend.preallocate(file, 1 << 20)
    sizes = [choose.choice((PAGE, 2 * PAGE, 5 * PAGE, 1000, 3 * PAGE + 17)) for _ in range(60)]
    sources = [buffer(size, shift=choose.choice((0, 0, 512, 3)), fill=noise(size, i)) for i, size in enumerate(sizes)]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    order = choose.sample(range(len(sizes)), len(sizes))
    await asyncio.gather(*(backend.write_from(file, offsets[i], sources[i]) for i in order))
    expected = b"".join(bytes(source) for source in sources)
    assert (tmp_path / "file").read_bytes()[: len(expected)] == expected

    targets = [buffer(size, shift=choose.choice((0, 0, 512, 3))) for size in sizes]
    reads = [
        asyncio.ensure_future(backend.read_into(file, offsets[i], targets[i], priority=choose.choice(list(Priority))))
        for i in order
    ]
    doomed = set(choose.sample(range(len(reads)), 15))
    await fakes_io.spin(choose.randrange(12))
    for number in doomed:
        reads[number].cancel()
    await asyncio.wait(reads)
    for number, index in enumerate(order):
        if number in doomed and reads[number].cancelled():
            targets[index][:] = b"\xee" * sizes[index]  # it is ours again
        else:
            reads[number].result()
    await backend.aclose()
    for number, index in enumerate(order):
        taken_back = number in doomed and reads[number].cancelled()
        assert targets[index] == (b"\xee" * sizes[index] if taken_back else sources[index])
    assert fakes_io.resources() == before


@needs_ring
async def test_opened_used_and_closed_over_and_over(tmp_path: Path) -> None:
    """Closing meets the ring's thread at every point of its turn."""
    before = fakes_io.resources()
    (tmp_path / "file").write_bytes(noise(PAGE))
    target = buffer(PAGE)
    for index in range(150):
        backend = UringBackend(1 + index % 3, PAGE, False)
        file = await backend.open_file(tmp_path / "file")
        if index % 2:
            await backend.read_into(file, 0, target)
        await backend.aclose()
    assert target == noise(PAGE)
    assert fakes_io.resources() == before


@needs_ring
async def test_neighbours_go_as_one_operation(tmp_path: Path) -> None:
    gate = Gate("read")
    backend = UringBackend(1, 8 * PAGE, False, HookedSyscalls(gate))
    (tmp_path / "file").write_bytes(noise(64 * PAGE))
    file = await backend.open_file(tmp_path / "file")
    targets = [buffer(2 * PAGE) for _ in range(8)]
    first = asyncio.ensure_future(backend.read_into(file, 60 * PAGE, buffer(PAGE)))
    await gate.arrival()
    rest = [asyncio.ensure_future(backend.read_into(file, 2 * i * PAGE, targets[i])) for i in range(8)]
    await fakes_io.spin()
    gate.open()
    await asyncio.gather(first, *rest)
    await backend.aclose()
    reads = [(op.offset, op.num_bytes) for op in gate.log if op.action == "read"]
    assert reads == [(60 * PAGE, PAGE), (0, 8 * PAGE), (8 * PAGE, 8 * PAGE)]
    assert b"".join(targets) == noise(64 * PAGE)[: 16 * PAGE]


@needs_ring
async def test_slow_calls_do_not_hold_up_transfers(tmp_path: Path) -> None:
    gate = Gate("fdatasync")
    backend = UringBackend(2, 4 * PAGE, False, HookedSyscalls(gate))
    file = await backend.open_file(tmp_path / "file", create=True)
    flushes = [asyncio.ensure_future(backend.fsync(file)) for _ in range(5)]
    await gate.arrival()
    await backend.write_from(file, 0, buffer(64 * PAGE, fill=b"a"))
    target = buffer(64 * PAGE)
    await backend.read_into(file, 0, target)
    assert target == b"a" * (64 * PAGE)
    assert not any(flush.done() for flush in flushes)
    gate.open()
    await asyncio.gather(*flushes)
    await backend.aclose()


@needs_ring
async def test_try_again_is_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "_MAX_RETRIES", 5)
    num_calls, num_refusals = 0, 3

    def hook(operation: Operation) -> None:
        nonlocal num_calls
        if operation.action == "read":
            num_calls += 1
            if num_calls <= num_refusals:
                raise fail(errno.EAGAIN)

    backend = UringBackend(1, PAGE, False, HookedSyscalls(hook))
    (tmp_path / "file").write_bytes(bytes(PAGE))
    file = await backend.open_file(tmp_path / "file")
    await backend.read_into(file, 0, buffer(PAGE))
    assert num_calls == 4
    num_calls, num_refusals = 0, 100
    with pytest.raises(StorageError, match="EAGAIN"):
        await backend.read_into(file, 0, buffer(PAGE))
    assert num_calls == 6
    await backend.aclose()


@needs_ring
@pytest.mark.parametrize("num_blocks", [1, 50])
async def test_one_wakeup_of_the_loop_per_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    backend = UringBackend(3, PAGE, False)
    file = await backend.open_file(tmp_path / "file", create=True)
    num_wakeups, eventfd_read = 0, os.eventfd_read

    def counted(descriptor: int) -> int:
        nonlocal num_wakeups
        num_wakeups += 1
        return eventfd_read(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", counted)
        end = num_blocks * PAGE
        await backend.write_many([Transfer(file, 0, buffer(end)), Transfer(file, end, buffer(1))])
    assert num_wakeups == 1
    await backend.aclose()


@needs_ring
async def test_memory_is_given_back_with_the_await(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    for direct in (False, fakes_io.supports_direct(tmp_path)):
        backend = UringBackend(2, PAGE, direct)
        file = await backend.open_file(tmp_path / "file")
        memory = bytearray(8 * PAGE)
        with pytest.raises(ShortTransferError):
            await backend.read_into(file, 0, memoryview(memory))
        memory.clear()  # BufferError if anyone still held a view
        await backend.aclose()


@needs_ring
async def test_bounce_buffers_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fakes_io.supports_direct(tmp_path):
        pytest.skip(f"no O_DIRECT in {tmp_path}")
    made: list[int] = []

    def counted(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return allocate(num_bytes)

    monkeypatch.setattr(uring, "allocate", counted)
    backend = UringBackend(3, BLOCK_BYTES, True)
    file = await backend.open_file(tmp_path / "file", create=True)
    source = buffer(20 * BLOCK_BYTES, shift=8, fill=noise(PAGE))
    target = buffer(20 * BLOCK_BYTES, shift=24)
    for _ in range(3):
        await backend.write_from(file, 0, source)
        await backend.read_into(file, 0, target)
    await until(lambda: backend.statistics().num_in_flight == 0)
    assert target == source
    assert 1 <= len(made) <= 3
    assert backend.statistics().extra["bounced_bytes"] == 120 * BLOCK_BYTES
    await backend.aclose()


def test_a_queue_depth_below_one_is_refused() -> None:
    before = fakes_io.resources()
    with pytest.raises(ValueError, match="queue_depth: expected at least 1, got 0"):
        UringBackend(0)
    assert fakes_io.resources() == before
