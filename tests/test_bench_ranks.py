"""Collectives as the benchmark measures them: between real processes, over gloo."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infinity.bench.pattern import Pattern
from infinity.bench.ranks import Case, Ranks, digits, open_ranks, whole_sum
from infinity.bench.results import GB
from infinity.errors import RanksError
from launch import outputs, run_ranks

MIB = 1 << 20

MEASURE = """
    from infinity.bench.ranks import open_ranks
    steps = []
    with open_ranks(torch.device("cpu")) as ranks:
        results = ranks.measure(
            seconds=0.6 if rank == 0 else 100.0, repeats=2 if rank == 0 else 50, largest_bytes=30 << 20,
            on_step=steps.append,
        )
        from pathlib import Path
        from infinity.bench.together import measure_together
        disks, each = measure_together(
            ranks.collectives, [Path(os.environ["DIRECTORY"]) / "nvme"], size_bytes=40 << 20,
            repeats=2 if rank == 0 else 50, backend="threads",
        )
    print(json.dumps({"disks": [disk.as_document() for disk in disks], "each": each}))
    print(json.dumps({"results": [result.as_document() for result in results], "ranks": ranks.as_document()}))
    print(json.dumps([[[run.num_bytes, run.seconds] for run in result.runs] for result in results]))
    print(json.dumps(steps))
"""


def test_two_ranks_measure_the_same(tmp_path: Path) -> None:
    said = [output.splitlines()[-4:] for output in outputs(run_ranks(MEASURE, DIRECTORY=str(tmp_path)))]
    assert said[0] == said[1]
    together, document, runs, steps = map(json.loads, said[0])
    assert [disk["route"] for disk in together["disks"]] == ["all nvme->host", "all host->nvme"]
    for disk, direction in zip(together["disks"], ("read_gb_s", "write_gb_s"), strict=True):
        assert (disk["size"], disk["repeats"]) == (64 * MIB, 2)  # two whole shards of 16 MiB each
        assert 0 < disk["gb_s"]["min"] <= disk["gb_s"]["max"] < 1000
        # In each run all bytes are divided by the slowest rank's time.
        assert disk["gb_s"]["min"] <= sum(rank[direction] for rank in together["each"])
    assert [rank["rank"] for rank in together["each"]] == [0, 1]
    assert {tuple(rank["nvme"]) for rank in together["each"]} == {(str(tmp_path / "nvme"),)}
    assert not list(tmp_path.iterdir())
    results = document["results"]
    assert document["ranks"]["num_ranks"] == 2
    assert document["ranks"]["transport"].startswith("gloo over TCP")
    kinds = {(result["route"], result["backend"].rpartition(", ")[2]) for result in results}
    transport = document["ranks"]["transport"]
    assert kinds == {("all-gather", transport), ("reduce-scatter", "fp32"), ("reduce-scatter", "bf16")}
    for result, its_runs in zip(results, runs, strict=True):
        assert result["block_size"] in (MIB, 4 * MIB)  # 16 MiB would take 80
        assert result["size"] == 2 * result["block_size"]
        assert (result["verified"], result["repeats"], result["queue_depth"]) == (True, 2, 1)  # as rank 0 said
        assert 0 < result["gb_s"]["min"] <= result["gb_s"]["median"] <= result["gb_s"]["max"] < 1000
        assert result["gb_s"]["max"] == pytest.approx(max(size / taken / GB for size, taken in its_runs))
        assert all(num_bytes % result["size"] == 0 for num_bytes, _ in its_runs)
        assert result["cpu_s_per_gb"] > 0
        assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert any(step.startswith("checking all-gather, 1 MiB per rank") for step in steps)


def test_when_rank_0_fails_the_others_end_soon_and_say_so() -> None:
    script = """
        from infinity.bench.ranks import open_ranks
        with open_ranks(torch.device("cpu"), timeout_seconds=600) as ranks:
            if rank == 0:
                raise RuntimeError("the disk is full")
            ranks.measure()
    """
    began = time.monotonic()
    first, other = run_ranks(script)
    assert time.monotonic() - began < 100
    assert first.status == other.status == 1
    assert "the disk is full" in first.complaints
    assert "waiting for rank 0 to have measured the other tiers: another rank has ended" in other.complaints


def test_all_stop_when_one_is_asked_to() -> None:
    script = """
        from infinity.bench.passes import InterruptedRunError
        from infinity.bench.ranks import open_ranks
        with open_ranks(torch.device("cpu")) as ranks:
            asked = []
            try:
                ranks.measure(seconds=1000, stop=lambda: rank == 1 and bool(asked), on_step=asked.append)
            except InterruptedRunError:
                print("stopped")
    """
    assert [output.splitlines()[-1] for output in outputs(run_ranks(script))] == ["stopped", "stopped"]


def test_without_torchrun_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with open_ranks(torch.device("cpu")) as ranks:
        assert ranks is None


class OneProcess:
    """Collectives of two ranks that are one process: both ranks' tensors are made here."""

    rank, num_ranks, local_rank = 0, 2, 0
    device = torch.device("cpu")
    transport, reduction, hosts = "a wire", "by hand", ("a", "a")

    def __init__(self, break_byte: int | None = None) -> None:
        self.break_byte = break_byte

    def exchange(self, fact: Any, phase: str) -> list[Any]:
        return json.loads(json.dumps([fact, fact]))  # type: ignore[no-any-return]

    def barrier(self, phase: str) -> None:
        pass

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor, *, phase: str) -> None:
        theirs = np.empty(tensor.numel(), np.uint8)
        Pattern(0).fill(theirs, 1, 0)
        output[: tensor.numel()] = tensor
        output[tensor.numel() :] = torch.from_numpy(theirs)
        self._break(output)

    def reduce_scatter_into(self, output: torch.Tensor, tensor: torch.Tensor, *, phase: str) -> None:
        output.copy_(tensor[: output.numel()])
        self._break(output)

    def _break(self, output: torch.Tensor) -> None:
        if self.break_byte is not None:
            output.view(torch.uint8)[self.break_byte] ^= 1


@pytest.mark.parametrize("place", [0, 2 * MIB - 1])
def test_one_wrong_byte_is_an_error(place: int) -> None:
    with pytest.raises(RanksError, match=r"rank 0 of 2, all-gather, 1 MiB per rank: the result is wrong over a wire"):
        Ranks(OneProcess(place)).measure(seconds=0.01)  # type: ignore[arg-type]


def test_a_sum_that_lacks_a_rank_is_an_error() -> None:
    with pytest.raises(RanksError, match=r"reduce-scatter, 1 MiB fp32 per rank: the result is wrong"):
        Ranks(OneProcess()).measure(seconds=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_ranks", [2, 64, 65, 1000])
def test_sums_are_exact_in_bf16_and_no_two_places_alike_in_all(num_ranks: int) -> None:
    total = whole_sum(0, 4096, num_ranks)
    assert total.max() <= 256
    assert np.array_equal(torch.from_numpy(total).bfloat16().float().numpy(), total)
    assert len(np.unique(total)) > 3
    first, second = (digits(0, 4096, rank, num_ranks) for rank in range(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(digits(1000, 10, 1, num_ranks), second[1000:1010])


def test_a_case_says_what_it_is() -> None:
    assert str(Case("all-gather", 4 * MIB, torch.uint8)) == "all-gather, 4 MiB per rank"
    assert str(Case("reduce-scatter", MIB, torch.bfloat16)) == "reduce-scatter, 1 MiB bf16 per rank"
