"""``Bell``: nothing that has ended is missed or waits, whoever rings when; and what it costs is given back."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

import fakes_io
import infinity.io.bell as module
from fakes_io import Kind, fail, until
from infinity.errors import StorageError
from infinity.io.bell import Bell
from infinity.io.completion import Completion


async def test_all_that_end_meanwhile_take_one_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    num_writes, num_reads = 0, 0
    write, read = os.eventfd_write, os.eventfd_read

    def counted_write(descriptor: int, value: int) -> None:
        nonlocal num_writes
        num_writes += 1
        write(descriptor, value)

    def counted_read(descriptor: int) -> int:
        nonlocal num_reads
        num_reads += 1
        return read(descriptor)

    monkeypatch.setattr(os, "eventfd_write", counted_write)
    monkeypatch.setattr(os, "eventfd_read", counted_read)
    bell = Bell()
    for turn in range(1, 4):
        completions = [Completion() for _ in range(5)]
        bell.ring(completions[:3])
        for completion in completions[3:]:
            bell.ring([completion])
        assert not any(completion.done for completion in completions)
        for completion in completions:
            assert not await completion.wait()
        assert (num_writes, num_reads) == (turn, turn)
    bell.close()


def elsewhere(ring: Callable[[], None]) -> None:
    """Ring in another thread, in the middle of what this one does."""
    thread = threading.Thread(target=ring)
    thread.start()
    thread.join()


async def test_who_rings_just_before_the_answer_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    bell = Bell()
    first, second, third = Completion(), Completion(), Completion()
    read = os.eventfd_read

    def late(descriptor: int) -> int:
        if not second.done:
            elsewhere(lambda: bell.ring([second]))
        return read(descriptor)

    monkeypatch.setattr(os, "eventfd_read", late)
    bell.ring([first])
    await until(lambda: first.done)
    await until(lambda: second.done)
    bell.ring([third])
    await until(lambda: third.done)
    bell.close()


async def test_who_rings_just_after_the_answer_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Completion(), Completion()

    class Late(deque[Completion]):
        """Where the answer finds nothing more; and then there is."""

        def __len__(self) -> int:
            found = super().__len__()
            if not found and first.done and not second.done:
                elsewhere(lambda: bell.ring([second]))
            return found

    monkeypatch.setattr(module, "deque", Late)
    bell = Bell()
    bell.ring([first])
    await until(lambda: first.done)
    await until(lambda: second.done)
    bell.close()


async def test_what_is_closed_gives_its_descriptor_back_and_rings_no_more() -> None:
    before = fakes_io.resources()
    bell = Bell()
    bell.ring([Completion()])
    bell.close()
    await fakes_io.spin()
    assert fakes_io.resources() == before


@pytest.mark.parametrize("name", ["threads", "uring", "aiofiles"])
async def test_no_descriptor_left_for_it_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "uring" and fakes_io.ring_refusal() is not None:
        pytest.skip(f"no io_uring: {fakes_io.ring_refusal()}")
    before = fakes_io.resources()
    backend = Kind(name, False).make()

    def refuse(*_: object) -> int:
        raise fail(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", refuse)
        with pytest.raises(StorageError, match=r"open failed.*EMFILE"):
            await backend.open_file(tmp_path / "file", create=True)
    assert not (tmp_path / "file").exists()
    file = await backend.open_file(tmp_path / "file", create=True)  # there are some again
    await file.aclose()
    await backend.aclose()
    assert fakes_io.resources() == before
