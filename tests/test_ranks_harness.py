"""Jobs on ranks say what each rank has returned or died of, and leave nothing behind."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from ranks_harness import JobError, RankServer, ranks

__all__ = ["ranks"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_job_has_processes_and_groups_of_its_own(ranks: RankServer, num_ranks: int) -> None:
    results = [ranks.run("ranks_jobs:sums", num_ranks, value=value) for value in (1.0, 2.0)]
    total = num_ranks * (num_ranks + 1) / 2
    assert [[each["total"].item() for each in result] for result in results] == [
        [total] * num_ranks,
        [2 * total] * num_ranks,
    ]
    assert len({each["pid"] for result in results for each in result}) == 2 * num_ranks
    assert all(each["files"] == [] for result in results for each in result)


def test_a_job_that_fails_shows_what_each_rank_said_and_the_next_one_runs(ranks: RankServer) -> None:
    with pytest.raises(JobError) as failed:
        ranks.run("ranks_jobs:fails_on_one", 3, how="raise", which=1)
    said = str(failed.value)
    assert "ranks_jobs:fails_on_one on 3 ranks" in said
    assert re.search(r"rank 1 ended with 1\n(?s:.*)ZeroDivisionError: of this rank", said)
    assert re.search(r"rank 0 ended with 1\n(?s:.*)all_reduce", said)
    killed = ranks.start("ranks_jobs:fails_on_one", how="kill", which=0).end()
    assert killed[0].code == -signal.SIGKILL
    assert killed[1].code == 1
    assert ranks.run("ranks_jobs:sums", value=1.0)[0]["total"].item() == 3


def test_a_job_that_hangs_is_ended_and_shows_where_it_was(ranks: RankServer) -> None:
    job = ranks.start("ranks_jobs:fails_on_one", how="hang", which=1, seconds=1.0)
    with pytest.raises(JobError, match=r"rank 1 was still running after 1 s\n(?s:.*)_sleep_for_ever"):
        job.results()
    assert not [pid for pid in job.pids if Path(f"/proc/{pid}").exists()]


def test_nothing_is_left_where_the_server_ends_in_the_middle_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RankServer() as server:
        job = server.start("ranks_jobs:fails_on_one", how="hang", which=1, seconds=600.0)
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    for pid in job.pids:
        _wait_for_the_end_of(pid)


def _wait_for_the_end_of(pid: int) -> None:
    """Of a process that is nobody's child any more."""
    deadline = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
