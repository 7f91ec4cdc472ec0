"""Which processors a process may use, told from the files of a system that is not this one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

from infinity.io.cores import Cores, OversubscriptionWarning, find_cores, warn_of_excess


def system(root: Path, own: str, files: dict[str, str]) -> Path:
    """A root directory with the process's cgroups and files below the cgroup mount."""
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "300000 100000"}, 0.5),
        ("0::/a\n", {"cpu.max": "200000 100000"}, 2.0),  # the container sees its own cgroup as the mount
        ("0::/../../elsewhere\n", {"cpu.max": "200000 50000", "elsewhere/cpu.max": "1 100000"}, 4.0),
        ("4:memory:/a\n1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        (
            "3:cpu,cpuacct:/docker/x\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "100000", "cpu,cpuacct/cpu.cfs_period_us": "50000"},
            2.0,
        ),
        (
            "3:cpuacct,cpu:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "100", "cpu,cpuacct/a/cpu.cfs_period_us": "100"},
            1.0,
        ),
        ("9:memory:/a\n", {"a/cpu.max": "100000 100000"}, None),  # not a cgroup of ours
        ("0::/a\n", {"a/cpu.max": "many few\n"}, None),
        ("0::/a\n", {"a/cpu.max": "100000 0\n"}, None),
        ("0::/a\n", {"a/cpu.max": "\n"}, None),
        ("nonsense", {}, None),
        ("0::/a\n", {}, None),
    ],
)
def test_the_smallest_quota_of_all_cgroups_counts(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    assert find_cores(system(tmp_path, own, files), 64) == Cores(64, quota)


def test_without_any_files_affinity_counts(tmp_path: Path) -> None:
    assert find_cores(tmp_path, 6) == Cores(6, None)


@pytest.mark.parametrize(
    ("cores", "num_usable"),
    [
        (Cores(8), 8),
        (Cores(8, 3.0), 3),
        (Cores(8, 3.01), 4),
        (Cores(8, 0.25), 1),
        (Cores(2, 16.0), 2),
        (Cores(0), 1),
    ],
)
def test_a_part_of_a_processor_counts_as_one(cores: Cores, num_usable: int) -> None:
    assert cores.num_usable == num_usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_affinity_of_this_process_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert find_cores(Path("/nowhere")) == Cores(1)
    finally:
        os.sched_setaffinity(0, before)
    assert find_cores(Path("/nowhere")) == Cores(len(before))


def test_more_threads_than_processors_are_told_with_the_repair() -> None:
    assert Cores(8, 2.5).excess(3) is None
    by_quota = Cores(64, 2.5).excess(64)
    assert by_quota is not None
    assert "64 threads" in by_quota
    assert "a quota of 2.5 processors" in by_quota
    assert "torch.set_num_threads(3)" in by_quota
    by_affinity = Cores(2, 8.0).excess(4)
    assert by_affinity is not None
    assert "may run on 2 processors" in by_affinity
    assert "OMP_NUM_THREADS=2" in by_affinity


def test_the_warning_is_typed_and_only_given_where_there_is_cause() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.warns(OversubscriptionWarning, match="3 threads"):
            warn_of_excess(Cores(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_excess(Cores(3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
