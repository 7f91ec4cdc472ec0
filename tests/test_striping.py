"""Directories of different speed: what each gets of a shard and of the capacity, and how their speed is found."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_store import FakeBackend
from infinity.config import BackendName, Config
from infinity.errors import ConfigError, StorageError
from infinity.io.backend import Backend, Priority, Transfer
from infinity.io.memory import allocate, as_bytes
from infinity.io.open import Choice, open_backend
from infinity.store import speeds as module
from infinity.store.directory import JobDirectory
from infinity.store.nvme import NvmeTier
from infinity.store.shard import ShardKey
from infinity.store.speeds import NOISE, measure, steady
from infinity.store.striping import STRIPE_BYTES, apportion, cut, divide_capacity, relative
from infinity.store.volumes import MARGIN_BYTES, OpenBackend
from infinity.train.cli import make_config
from infinity.train.settings import TrainSettings

PAGE = 4096
MIB = 1 << 20
T = TypeVar("T")
Fault = Callable[[str, Path], BaseException | None]

weights_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=6).map(relative)


# --- dividing pages, shards, the capacity


@given(num_pages=st.integers(0, 1 << 40), weights=weights_lists)
def test_apportioned_pages_add_up_and_keep_to_the_weights(num_pages: int, weights: tuple[float, ...]) -> None:
    shares = apportion(num_pages, weights)
    assert sum(shares) == num_pages
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - num_pages * weight / sum(weights)) < 1.001
        assert share >= 0


def test_equal_weights_differ_by_a_page() -> None:
    assert apportion(7, (1, 1, 1)) == [3, 2, 2]
    assert apportion(6, relative((3, 3, 3))) == [2, 2, 2]
    assert apportion(9, (2, 1)) == [6, 3]


@given(st.lists(st.floats(min_value=5e-324, max_value=1.7e308), min_size=1, max_size=6))
def test_relative_weights_are_positive_and_at_most_one_whatever_the_unit(speeds: list[float]) -> None:
    weights = relative(speeds)
    assert max(weights) == 1
    assert min(weights) > 0
    assert sum(cut(64 * MIB, weights, [0] * len(weights))) == 64 * MIB


@given(num_pages=st.integers(1, 1 << 16), weights=weights_lists, data=st.data())
def test_pieces_of_a_shard(num_pages: int, weights: tuple[float, ...], data: st.DataObject) -> None:
    used = data.draw(st.lists(st.integers(0, 1 << 36), min_size=len(weights), max_size=len(weights)))
    sizes = cut(num_pages * PAGE, weights, used)
    assert sum(sizes) == num_pages * PAGE
    assert all(size % PAGE == 0 for size in sizes)
    members = [index for index, size in enumerate(sizes) if size]
    assert len(members) == 1 or min(sizes[index] for index in members) >= STRIPE_BYTES
    for index in members:
        exact = num_pages * weights[index] / sum(weights[each] for each in members)
        assert abs(sizes[index] / PAGE - exact) < 1.001
    if num_pages * PAGE * min(weights) >= STRIPE_BYTES * sum(weights):
        assert len(members) == len(weights), "all share what is large enough for all"


def test_a_small_shard_goes_where_the_least_time_is_taken() -> None:
    assert cut(PAGE, (1, 1), (0, 0)) == [PAGE, 0]
    assert cut(PAGE, (1, 1), (PAGE, 0)) == [0, PAGE]
    assert cut(PAGE, (1, 0.5), (0, 0)) == [PAGE, 0], "the faster"
    assert cut(PAGE, (1, 0.5), (2 * PAGE, PAGE)) == [PAGE, 0]
    assert cut(PAGE, (1, 0.5), (2 * PAGE, 0)) == [0, PAGE], "which would be done with both before"


@settings(max_examples=50)
@given(weights=weights_lists, sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=12))
def test_what_all_hold_keeps_to_the_weights_though_no_single_shard_does(
    weights: tuple[float, ...], sizes: list[int]
) -> None:
    used = [0] * len(weights)
    for _ in range(20):
        for num_pages in sizes:
            parts = cut(num_pages * PAGE, weights, used)
            used = [before + part for before, part in zip(used, parts, strict=True)]
    for held, weight in zip(used, weights, strict=True):
        exact = sum(used) * weight / sum(weights)
        rounding = 20 * len(sizes)
        assert held <= exact + (len(weights) * max(sizes) + rounding) * PAGE


@settings(max_examples=300)
@given(
    num_pages=st.integers(0, 1000),
    weights=weights_lists,
    data=st.data(),
)
def test_capacity_follows_the_weights_as_far_as_there_is_room(
    num_pages: int, weights: tuple[float, ...], data: st.DataObject
) -> None:
    devices = data.draw(st.lists(st.integers(0, 2), min_size=len(weights), max_size=len(weights)))
    room = {device: data.draw(st.integers(0, 600)) * PAGE + 5 for device in set(devices)}
    shares = divide_capacity(num_pages * PAGE - 7 * (num_pages > 0), weights, devices, room)
    if shares is None:
        assert sum(room[device] // PAGE for device in room) < num_pages
        return
    assert sum(shares) == num_pages * PAGE
    taken = {device: sum(s for s, d in zip(shares, devices, strict=True) if d == device) for device in room}
    assert all(taken[device] <= room[device] for device in room)
    pages, rounding = [share / PAGE for share in shares], len(weights)
    for index, device in enumerate(devices):
        if taken[device] + PAGE <= room[device]:  # it holds its part, and in proportion more where another is full
            for other in range(len(weights)):
                fair = (pages[other] - rounding) * weights[index] / weights[other]
                assert pages[index] >= fair - rounding


def test_capacity_on_a_full_disk_goes_to_the_others() -> None:
    assert divide_capacity(9 * PAGE, (1, 1, 1), [0, 1, 2], {0: PAGE, 1: 99 * PAGE, 2: 99 * PAGE}) == [
        PAGE,
        4 * PAGE,
        4 * PAGE,
    ]
    assert divide_capacity(9 * PAGE, (1, 1), [0, 0], {0: 9 * PAGE}) == [5 * PAGE, 4 * PAGE]
    assert divide_capacity(9 * PAGE, (1, 1), [0, 0], {0: 9 * PAGE - 1}) is None


# --- measuring, on a loop whose time passes only while everything waits for it


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer; threads take no time."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        wait = selector.select

        def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            ready = wait(None if timeout is None else 0)
            if not ready and timeout:
                self.now += timeout
            return ready

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Disk:
    """Moves one transfer after the other.

    Attributes:
        seconds_for: how long a transfer takes, by its number of bytes.
        num_probed: files opened but for the shards'.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self.seconds_for: Callable[[int], float] = lambda num_bytes: num_bytes / bytes_per_second
        self.num_probed = 0
        self._busy_until = 0.0

    async def move(self, num_bytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._busy_until = max(self._busy_until, now) + self.seconds_for(num_bytes)
        await asyncio.sleep(self._busy_until - now)


class DiskBackend(FakeBackend):
    """On a disk of known speed; fails a transfer if told."""

    def __init__(self, disk: Disk, *, direct: bool) -> None:
        super().__init__()
        self._disk = disk
        self._is_direct = direct

    @property
    def direct(self) -> bool:
        return self._is_direct

    async def _transfer(self, operation: str, transfers: Sequence[Transfer], priority: Priority) -> None:
        await self._disk.move(sum(len(each.buffer) for each in transfers))
        await super()._transfer(operation, transfers, priority)

    async def preallocate(self, file: Any, size_bytes: int) -> None:
        self._disk.num_probed += file.path.name != "shards.bin"
        await super().preallocate(file, size_bytes)


class DiskOpener:
    """``open_backend`` for directories whose names end in the number of their disk."""

    def __init__(self, *disks: Disk, direct: bool = True) -> None:
        self.disks = disks
        self.backends: list[DiskBackend] = []
        self._direct = direct

    async def __call__(
        self, name: BackendName, directory: Path, *, num_threads: int, block_bytes: int
    ) -> tuple[Backend, Choice]:
        disk = self.disks[int(directory.parent.name[-1])]
        self.backends.append(DiskBackend(disk, direct=self._direct))
        return self.backends[-1], Choice("fake", direct=self._direct, reasons=("a test asked for it",))


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that claim to be on file systems of their own; a round moves 64 KiB in each."""
    monkeypatch.setattr(module, "ROUND_BYTES", 64 << 10)
    monkeypatch.setattr(JobDirectory, "device", property(lambda self: int(self.path.parent.name[-1])))
    made = [tmp_path / f"disk{index}" for index in range(3)]
    for path in made:
        path.mkdir()
    return made


async def open_tier(
    paths: Sequence[Path],
    opener: OpenBackend,
    *,
    capacity_bytes: int = 24 * MIB,
    weights: Sequence[float] | None = None,
) -> NvmeTier:
    return await NvmeTier.open(
        paths,
        capacity_bytes=capacity_bytes,
        backend_name="threads",
        num_threads=2,
        block_bytes=MIB,
        weights=weights,
        open_backend=opener,
    )


def weights_and_reasons(
    paths: Sequence[Path], opener: OpenBackend, **options: Any
) -> tuple[tuple[float, ...], list[str]]:
    async def find() -> tuple[tuple[float, ...], list[str]]:
        tier = await open_tier(paths, opener, **options)
        try:
            assert [path.name for path in paths[0].rglob(".infinity-probe*")] == []
            return tier.weights, [choice.reasons[-1] for choice in tier.choices.values()]
        finally:
            await tier.aclose()

    found = run(find())
    assert [path for parent in paths for path in parent.iterdir()] == []
    return found


def test_a_disk_of_half_the_speed_gets_a_third_and_both_end_together(paths: list[Path]) -> None:
    async def check() -> None:
        opener = DiskOpener(Disk(2e6), Disk(1e6))
        tier = await open_tier(paths[:2], opener)
        try:
            assert tier.weights == pytest.approx((1, 0.5), rel=0.02)
            before = [backend.statistics().written_bytes for backend in opener.backends]
            begun = asyncio.get_running_loop().time()
            large = as_bytes(allocate(9 * MIB))
            await tier.write(ShardKey(0, 0, "master"), large)
            assert asyncio.get_running_loop().time() - begun == pytest.approx(9 * MIB / 3e6, rel=0.02)
            for unit in range(1, 40):
                await tier.write(ShardKey(unit, 0, "master"), large[: 64 << 10])
            fast, slow = (b.statistics().written_bytes - a for a, b in zip(before, opener.backends, strict=True))
            assert fast + slow == 9 * MIB + 39 * (64 << 10)
            assert slow / (fast + slow) == pytest.approx(1 / 3, abs=0.02)
            sizes = [(path / "shards.bin").stat().st_size for path in tier.choices]
            assert sizes[1] / sum(sizes) == pytest.approx(1 / 3, abs=0.02)
        finally:
            await tier.aclose()

    run(check())


def test_measured_speeds_have_the_order_and_the_proportion_of_the_disks(paths: list[Path]) -> None:
    weights, reasons = weights_and_reasons(paths, DiskOpener(Disk(1e6), Disk(4e6), Disk(2e6)))
    assert weights == pytest.approx((0.25, 1, 0.5), rel=0.05)
    assert reasons[1] == ("weight 1: 0.00 GB/s, reads and writes together, measured while all directories worked")
    assert reasons[2].startswith("weight 0.5: ")


def test_disks_that_differ_by_noise_are_equal(paths: list[Path]) -> None:
    weights, _ = weights_and_reasons(paths, DiskOpener(Disk(1.0e6), Disk(0.85e6), Disk(0.5e6)))
    assert weights[:2] == (1, 1)
    assert weights[2] == pytest.approx(0.5 / 0.925, rel=0.05)


def test_a_hiccup_does_not_count(paths: list[Path]) -> None:
    disks = [Disk(4e6) for _ in range(3)]
    plain, transfers = disks[1].seconds_for, iter(range(1000))
    disks[1].seconds_for = lambda num_bytes: plain(num_bytes) + (0.1 if next(transfers) == 5 else 0)
    assert weights_and_reasons(paths, DiskOpener(*disks))[0] == (1, 1, 1)


def test_directories_that_share_a_disk_are_measured_as_they_share_it(paths: list[Path]) -> None:
    shared = Disk(2e6)
    weights, _ = weights_and_reasons(paths, DiskOpener(shared, shared, Disk(2e6)))
    assert weights == pytest.approx((0.5, 0.5, 1), rel=0.1)


def test_a_slow_disk_is_measured_once(paths: list[Path]) -> None:
    disks = Disk(1e3), Disk(1e6)
    weights, _ = weights_and_reasons(paths[:2], DiskOpener(*disks))
    assert weights == pytest.approx((1e-3, 1), rel=0.1)
    assert [disk.num_probed for disk in disks] == [1, 1]


def test_given_weights_are_not_measured(paths: list[Path]) -> None:
    opener = DiskOpener(Disk(1e6), Disk(1e6))
    assert weights_and_reasons(paths[:2], opener, weights=(1, 4)) == (
        (0.25, 1),
        ["weight 0.25: nvme_weights", "weight 1: nvme_weights"],
    )
    assert [disk.num_probed for disk in opener.disks] == [0, 0]


def test_what_need_not_or_cannot_be_measured_is_equal(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def found(num: int, *, direct: bool = True, capacity_bytes: int = MIB) -> str:
        opener = DiskOpener(*(Disk(index + 1.0) for index in range(num)), direct=direct)
        weights, reasons = weights_and_reasons(paths[:num], opener, capacity_bytes=capacity_bytes)
        assert weights == (1,) * num
        assert len(set(reasons)) == 1
        assert [disk.num_probed for disk in opener.disks] == [0] * num
        return reasons[0].removeprefix("weight 1: ")

    assert found(1) == "the only directory"
    assert found(2, capacity_bytes=(128 << 10) - PAGE) == "too little state for speed to matter"
    cached = found(2, direct=False)
    assert cached.startswith(f"I/O in {paths[0]}/infinity-rank0, {paths[1]}/infinity-rank0 goes through the page cache")
    free = {"disk0": 1 << 30, "disk1": 1 << 15}
    with monkeypatch.context() as patch:
        patch.setattr(JobDirectory, "free_bytes", lambda self: free[self.path.parent.name] + MARGIN_BYTES)
        assert found(2) == f"{paths[1]}/infinity-rank0 has no room to measure in"
    monkeypatch.setattr(JobDirectory, "device", property(lambda self: 7))
    assert found(2) == "all directories are on one file system"


def test_directories_on_one_device_have_equal_weights() -> None:
    assert steady([3, 1, 2], [0, 0, 0]) == [2, 2, 2]
    assert steady([3, 1, 9], [0, 0, 1]) == [2, 2, 9]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=6))
def test_steady_speeds_keep_the_order_and_equals_are_within_the_noise(speeds: list[float]) -> None:
    kept = steady(speeds, range(len(speeds)))
    for one, kept_one in zip(speeds, kept, strict=True):
        assert abs(kept_one / one - 1) <= NOISE / (1 - NOISE) + 1e-9
        for other, kept_other in zip(speeds, kept, strict=True):
            assert one < other or kept_one >= kept_other
            assert kept_one != kept_other or one >= (1 - NOISE) * other - 1e-9


def test_a_disk_that_fails_when_measured_is_refused_and_nothing_is_left(paths: list[Path]) -> None:
    for operation in ("open_file", "preallocate", "read", "write"):
        opener = DiskOpener(Disk(1e6), Disk(1e6))

        def fault(happening: str, path: Path, operation: str = operation) -> BaseException | None:
            return StorageError("broken", path=path) if happening == operation and "disk1" in str(path) else None

        async def fail(opener: DiskOpener = opener, fault: Fault = fault) -> None:
            async def open_it(name: BackendName, directory: Path, **sizes: int) -> tuple[Backend, Choice]:
                opened = await opener(name, directory, **sizes)
                opener.backends[-1].faults = fault
                return opened

            with pytest.raises(StorageError, match="broken"):
                await open_tier(paths[:2], open_it)

        run(fail())
        assert all(backend.closed for backend in opener.backends)
        assert [path for parent in paths for path in parent.iterdir()] == []


def test_a_measurement_cancelled_at_any_time_leaves_nothing(paths: list[Path]) -> None:
    async def cancelled_after(seconds: float) -> bool:
        task = asyncio.ensure_future(open_tier(paths[:2], DiskOpener(Disk(1e6), Disk(1e6))))
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        try:
            tier = await task
        except asyncio.CancelledError:
            return True
        await tier.aclose()
        return False

    outcomes = [run(cancelled_after(tenth / 10 * 0.4)) for tenth in range(11)]
    assert outcomes[0]
    assert outcomes[5]
    assert [path for parent in paths for path in parent.iterdir()] == []


async def test_real_directories_are_measured_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_BYTES", 2 * MIB)
    directories = [tmp_path / "a", tmp_path / "b"]
    backends = []
    for directory in directories:
        directory.mkdir()
        backends.append((await open_backend("threads", directory, num_threads=2, block_bytes=MIB))[0])
    try:
        speeds = await measure(list(zip(backends, directories, strict=True)))
        assert all(1e3 < speed < 1e12 for speed in speeds)
        assert all(backend.statistics().read_bytes >= MIB for backend in backends)
        assert [path for directory in directories for path in directory.iterdir()] == []
    finally:
        for backend in backends:
            await backend.aclose()


# --- Config and the command


def test_config_takes_one_positive_weight_for_each_directory() -> None:
    assert Config(nvme=("/a", "/b")).nvme_weights is None
    assert Config(nvme=("/a", "/b"), nvme_weights=(2, 1)).nvme_weights == (2.0, 1.0)
    for weights, message in (
        ((2, 1, 1), r"nvme_weights: expected one weight for each of the 2 nvme directories, got \(2, 1, 1\)"),
        ((), "nvme_weights: expected one weight for each of the 2 nvme directories"),
        ((2, 0), "nvme_weights: Input should be greater than 0, got 0"),
        ((2, -1), "nvme_weights: Input should be greater than 0"),
        ((2, float("inf")), "nvme_weights: Input should be a finite number"),
        ((2, float("nan")), "nvme_weights: Input should be"),
        ((2, "fast"), "nvme_weights: Input should be a valid number.*got 'fast'"),
    ):
        with pytest.raises(ConfigError, match=message):
            Config(nvme=("/a", "/b"), nvme_weights=weights)
    with pytest.raises(ConfigError, match="nvme_weights: expected one weight for each of the 0 nvme directories"):
        Config(nvme_weights=(1,))


def test_the_train_command_takes_weights_as_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"nvme": ["/a", "/b"], "nvme_weights": [3, 1.5]}')
    flags: dict[str, Any] = dict.fromkeys([*Config.model_fields, *TrainSettings.model_fields])
    assert make_config(file, flags).nvme_weights == (3, 1.5)
    assert make_config(file, {**flags, "nvme_weights": "2,1"}).nvme_weights == (2, 1)
    with pytest.raises(ConfigError, match="expected one weight for each of the 2 nvme directories"):
        make_config(file, {**flags, "nvme_weights": "2"})
