"""Two ranks on two hosts, of which the cable between is pulled: for a moment, and for good."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import TwoHosts
from ranks_harness import Job, RankServer, ranks

__all__ = ["ranks"]

pytestmark = pytest.mark.multihost

NUM_STEPS, PAUSE_AT = 10, 5
SCENARIO: dict[str, Any] = {
    "precision": "bf16", "durability": 1, "accumulation": 2, "num_directories": 1, "num_ranks": 2, "stage": 3,
    "max_grad_norm": 0.5, "timeout_seconds": 30.0,
}  # fmt: skip
IMPATIENT = SCENARIO | {"timeout_seconds": 3.0}


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(ranks: RankServer, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank sees on one host."""
    nvme = tmp_path_factory.mktemp("nvme")
    return [told["seen"] for told in _start(ranks, None, nvme, durable=False).results()]


def test_training_between_hosts_gives_the_numbers_of_one_host(
    ranks: RankServer, hosts: TwoHosts, undisturbed: list[Any], tmp_path: Path
) -> None:
    told = _start(ranks, hosts, tmp_path).results()
    assert told[0]["host"] != told[1]["host"]
    assert [each["seen"] for each in told] == undisturbed


def test_training_goes_on_where_the_cable_is_out_for_a_moment(
    ranks: RankServer, hosts: TwoHosts, undisturbed: list[Any], tmp_path: Path
) -> None:
    job = _start(ranks, hosts, tmp_path, pause_at=PAUSE_AT)
    _pull(job, hosts)
    time.sleep(1.0)
    hosts.mend()
    told = job.results()
    assert [each["error"] for each in told] == ["", ""]
    assert [each["seen"] for each in told] == undisturbed


def test_training_ends_where_the_cable_is_out_for_good_and_goes_on_from_its_commit(
    ranks: RankServer, hosts: TwoHosts, undisturbed: list[Any], tmp_path: Path
) -> None:
    job = _start(ranks, hosts, tmp_path, scenario=IMPATIENT, pause_at=PAUSE_AT)
    _pull(job, hosts)
    pulled = time.monotonic()
    try:
        told = job.results()
    finally:
        hosts.mend()
    assert time.monotonic() - pulled < 5 * IMPATIENT["timeout_seconds"]
    assert all("rank" in each["error"] for each in told), told
    assert all(len(each["seen"]) == PAUSE_AT + 1 for each in told)
    again = _start(ranks, hosts, tmp_path).results()
    assert again[0]["began"] == again[1]["began"]
    assert PAUSE_AT - 1 <= again[0]["began"] <= PAUSE_AT
    assert [first["seen"] | second["seen"] for first, second in zip(told, again, strict=True)] == undisturbed


def _start(ranks: RankServer, hosts: TwoHosts | None, nvme: Path, **arguments: Any) -> Job:
    arguments = {"scenario": SCENARIO, "nvme": str(nvme), "num_steps": NUM_STEPS, **arguments}
    if hosts is not None:
        arguments |= {"hosts": hosts.pids, "environment": hosts.environment}
    return ranks.start("ranks_jobs:live_and_pause", 2, seconds=90.0, **arguments)


def _pull(job: Job, hosts: TwoHosts) -> None:
    """Pull the cable while both ranks wait in the middle of a step, and have them go on."""
    deadline = time.monotonic() + 60
    while len(list(job.directory.glob("paused-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hosts.cut()
    (job.directory / "go-on").touch()
