"""``Ring``: io_uring from ctypes, as much of it as moving blocks of files needs.

One thread owns a ring: it prepares operations, and ``wait`` hands them to the kernel and sleeps until something has
ended, in one system call, without the GIL. Any other thread may ``wake`` it, by an eventfd whose read is one more
operation of the ring: so one wait serves completions and wake-ups alike, and nothing polls.

**Memory.** Addresses are given as numbers; the memory belongs to the caller, who keeps it until the operation's
completion has come out of ``wait``. ``close`` returns once none is in flight: closing the descriptor alone would
leave the kernel writing into memory that nobody keeps any more.

**Ordering.** The rings are shared with the kernel, and Python has no memory barriers. Without ``SQPOLL`` the kernel
reads the submission ring only within the owner's own system calls, on the same processor: program order is enough.
Completions come from any processor, which stores an entry first and the tail that covers it after. So the owner must
load the tail first and the entry after, and a system call between the two would be too late: what ends after it is
seen too. ``_reap`` therefore *computes the address* of every entry from the tail that it has just loaded. Loads are
kept in order by such a dependency on every processor that Linux runs on (the one exception, Alpha, is gone), however
much of an interpreter lies in between. In the other direction nothing can go wrong: at most half as many operations
as the completion ring has entries are in flight, so an entry is used again only many system calls after it was read.

**What is not used, and why** (measured with this class and a bare loop, 4 MiB x 8 in flight, medians of 7-9 runs,
on a machine that others used too): ``SQPOLL`` burns a core. ``COOP_TASKRUN`` and ``DEFER_TASKRUN`` changed nothing
that could be told from noise (.0068 and .0071 CPU seconds per GB against .0074; the same bandwidth), at one
completion per block of megabytes. Registered files: nothing either. Registered buffers save .0013 (32 MiB x 2) to .0020
CPU seconds per GB and no time, but count against the memlock limit (8 MiB for most users: ENOMEM), would need every
lease of memory to be known to every ring, and hold *pages*: where memory is unmapped and mapped again, or its pages
are given back (``MADV_DONTNEED``), while registered, a read fills pages that nobody sees, without an error.
``IOPOLL`` needs poll queues that an administrator must have set up. The package ``liburing`` never releases the GIL,
and ``uring-api`` is a release candidate: a page of ctypes is less to depend on.

Needs Linux 5.7 (reads that wait for an eventfd without a thread of the kernel's). What a kernel can is found out by
trying: making a ring makes one read through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SYS_SETUP = 425  # these numbers are the same on every 64-bit architecture
_SYS_ENTER = 426
_FEATURES = 1 << 0 | 1 << 5  # both rings in one mapping; waiting reads need no thread of the kernel's
_OFFSET_SQES = 0x10000000
_ENTER_GETEVENTS = 1

# Places in struct io_uring_params, in words of 32 bits.
_PARAMETER_WORDS = 30
_SQ_ENTRIES, _CQ_ENTRIES, _FEATURE_BITS = 0, 1, 5
_SQ_HEAD, _SQ_TAIL, _SQ_ARRAY = 10, 11, 16
_CQ_HEAD, _CQ_TAIL, _CQ_ENTRY = 20, 21, 25

_READV, _WRITEV, _READ, _WRITE = 1, 2, 22, 23
_SQE = struct.Struct("=BBHiQQIIQ24x")  # opcode, flags, ioprio, descriptor, offset, address, length, flags, token
_CQE = struct.Struct("=QiI")  # token, result, flags
_U32 = 0xFFFFFFFF

_WAKE = 0
_MAX_BYTES = 0x7FFFF000  # what Linux moves in one operation at most
_MAX_SEGMENTS = 1024  # IOV_MAX
_PAUSE_SECONDS = 0.001

_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
_STATUS = Path("/proc/self/status")
_libc = ctypes.CDLL(None, use_errno=True)


class Ring:
    """Positioned reads and writes, many in flight at once. Owned by the thread that calls ``wait``.

    Args:
        num_operations: how many may be in flight at once.

    Raises:
        OSError: the kernel refuses this process a ring (``refusal`` says why, in words), or more descriptors.
    """

    def __init__(self, num_operations: int) -> None:
        self._in_flight: dict[int, object] = {}
        with contextlib.ExitStack() as undo:
            self._descriptor, parameters = _setup(num_operations + 1)  # one more, to be woken by
            undo.callback(os.close, self._descriptor)
            self._map(parameters, undo)
            self._eventfd = os.eventfd(0)
            undo.callback(os.close, self._eventfd)
            self._counter = ctypes.c_uint64()
            self.wake()
            self._listen()
            self._drain()
            self._resources = undo.pop_all()

    def _map(self, parameters: Sequence[int], undo: contextlib.ExitStack) -> None:
        num_entries = parameters[_SQ_ENTRIES]
        rings_bytes = max(
            parameters[_SQ_ARRAY] + 4 * num_entries, parameters[_CQ_ENTRY] + _CQE.size * parameters[_CQ_ENTRIES]
        )
        self._rings = undo.enter_context(mmap.mmap(self._descriptor, rings_bytes, offset=0))
        self._sqes = undo.enter_context(mmap.mmap(self._descriptor, _SQE.size * num_entries, offset=_OFFSET_SQES))
        self._words = undo.enter_context(memoryview(self._rings)[: rings_bytes // 4 * 4].cast("I"))
        self._sq_head, self._sq_tail = parameters[_SQ_HEAD] // 4, parameters[_SQ_TAIL] // 4
        self._cq_head, self._cq_tail = parameters[_CQ_HEAD] // 4, parameters[_CQ_TAIL] // 4
        self._sq_mask, self._cq_mask = num_entries - 1, parameters[_CQ_ENTRIES] - 1
        self._cq_entry = parameters[_CQ_ENTRY]
        for index in range(num_entries):
            self._words[parameters[_SQ_ARRAY] // 4 + index] = index

    def transfer(
        self, token: int, descriptor: int, offset: int, segments: Sequence[tuple[int, int]], *, write: bool
    ) -> None:
        """Prepare an operation; the next ``wait`` begins it. It may move fewer bytes than asked for.

        Args:
            token: what its completion is known by; positive, and not in use.
            descriptor: an open file, which stays open until the completion.
            offset: byte offset in the file.
            segments: address and number of bytes of the memory to fill or to write, in the order of the file.
            write: the direction.
        """
        if len(segments) == 1:
            ((address, length),) = segments
            self._prepare(_WRITE if write else _READ, token, descriptor, offset, address, min(length, _MAX_BYTES))
        else:
            vectors = np.array(segments[:_MAX_SEGMENTS], np.uint64)
            address = vectors.__array_interface__["data"][0]
            opcode = _WRITEV if write else _READV
            self._prepare(opcode, token, descriptor, offset, address, len(vectors), vectors)

    def wait(self) -> list[tuple[int, int]]:
        """Begin what was prepared, and sleep until something has ended or ``wake`` was called.

        Returns:
            Tokens and results: how many bytes moved, 0 at the end of a file, or a negative error number. Empty where
            only ``wake`` was called.
        """
        self._listen()
        self._enter()
        return self._reap()

    def wake(self) -> None:
        """Let ``wait`` return, now or when it is called next; from any thread."""
        os.eventfd_write(self._eventfd, 1)

    def close(self) -> None:
        """Wait until nothing is in flight, then give everything back; by the owner, or once it has ended."""
        if _WAKE in self._in_flight:
            self.wake()
        self._drain()
        self._resources.close()

    def _listen(self) -> None:
        if _WAKE not in self._in_flight:
            self._prepare(_READ, _WAKE, self._eventfd, 0, ctypes.addressof(self._counter), 8)

    def _drain(self) -> None:
        while self._in_flight:
            self._enter()
            self._reap()

    def _prepare(
        self, opcode: int, token: int, descriptor: int, offset: int, address: int, length: int, keep: object = None
    ) -> None:
        words, tail = self._words, self._words[self._sq_tail]
        assert len(self._in_flight) <= self._sq_mask
        assert token not in self._in_flight
        place = (tail & self._sq_mask) * _SQE.size
        _SQE.pack_into(self._sqes, place, opcode, 0, 0, descriptor, offset, address, length, 0, token)
        self._in_flight[token] = keep
        words[self._sq_tail] = (tail + 1) & _U32

    def _enter(self) -> None:
        """Begin what was prepared, and sleep if nothing has ended; may return early."""
        words = self._words
        while True:
            num_new = (words[self._sq_tail] - words[self._sq_head]) & _U32
            num_awaited = words[self._cq_tail] == words[self._cq_head]
            num_begun = _libc.syscall(_SYS_ENTER, self._descriptor, num_new, num_awaited, _ENTER_GETEVENTS, None, 0)
            if num_begun == num_new:
                return
            if num_begun < 0 and (code := ctypes.get_errno()) != errno.EINTR:
                if code not in (errno.EAGAIN, errno.EBUSY):
                    raise OSError(code, os.strerror(code))
                if not num_awaited:
                    return
                time.sleep(_PAUSE_SECONDS)  # the kernel is out of memory for now

    def _reap(self) -> list[tuple[int, int]]:
        words, ended = self._words, []
        tail = words[self._cq_tail]
        for distance in range((tail - words[self._cq_head]) & _U32, 0, -1):
            place = self._cq_entry + ((tail - distance) & self._cq_mask) * _CQE.size  # from the tail: see above
            token, result, _ = _CQE.unpack_from(self._rings, place)
            del self._in_flight[token]
            if token != _WAKE:
                ended.append((token, result))
            elif result < 0 and -result not in (errno.EINTR, errno.EAGAIN):
                raise OSError(-result, os.strerror(-result))
        words[self._cq_head] = tail
        return ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a process gets no io_uring.

    Attributes:
        reason: in words.
        repair: what would help, in words.
        command: the same for a shell; ``None`` where there is none.
    """

    reason: str
    repair: str
    command: str | None = None


def explain_refusal(error: OSError) -> Refusal:
    """Why the kernel refused a ring.

    Args:
        error: what ``Ring`` raised.
    """
    code, is_filtered = error.errno, _is_filtered()
    if code == errno.EPERM:
        disabled = _DISABLED.read_text().strip() if _DISABLED.exists() else "0"
        if disabled != "0":
            reason = f"io_uring is switched off on this machine (kernel.io_uring_disabled={disabled})"
            return Refusal(reason, "an administrator can allow it", "sysctl kernel.io_uring_disabled=0")
        by = "the seccomp filter" if is_filtered else "a security module (SELinux, AppArmor) or the seccomp filter"
        return Refusal(
            f"io_uring is forbidden here, most likely by {by} of a container (Docker's default is one)",
            "run it with a profile that allows io_uring_setup and io_uring_enter",
            "docker run --security-opt seccomp=docker/seccomp.json",
        )
    if code in (errno.ENOSYS, errno.EINVAL):
        return Refusal(
            "this kernel has no io_uring, or one that is too old (Linux 5.7 or later is needed), or a sandbox hides it",
            "run it outside of the sandbox" if is_filtered else "boot a newer kernel",
        )
    if code == errno.ENOMEM:
        reason, repair = "no memory that may be locked for an io_uring", "raise the memlock limit (ulimit -l)"
        return Refusal(reason, repair, "ulimit -l unlimited")
    if code in (errno.EMFILE, errno.ENFILE):
        return Refusal("no descriptors are left for an io_uring", "raise the limit (ulimit -n)", "ulimit -n 65536")
    return Refusal(f"no io_uring: {error.strerror}", "use io_backend='threads'")


def refusal(error: OSError) -> str:
    """Why the kernel refused a ring, and what would help, in one line.

    Args:
        error: what ``Ring`` raised.
    """
    why = explain_refusal(error)
    return f"{why.reason}: {why.repair}" + (f" ({why.command})" if why.command else "")


def _is_filtered() -> bool:
    """Whether a seccomp filter judges this process's system calls."""
    try:
        return "\nSeccomp:\t2\n" in _STATUS.read_text()
    except OSError:
        return False


def _setup(num_entries: int) -> tuple[int, Sequence[int]]:
    """A new ring's descriptor, and what the kernel says about its layout."""
    parameters = (ctypes.c_uint32 * _PARAMETER_WORDS)()
    descriptor = _libc.syscall(_SYS_SETUP, num_entries, ctypes.byref(parameters))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if ~parameters[_FEATURE_BITS] & _FEATURES:
        os.close(descriptor)
        raise OSError(errno.ENOSYS, "io_uring of this kernel is too old")
    return descriptor, tuple(parameters)
