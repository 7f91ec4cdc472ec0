"""Collectives between real processes over gloo; and the words for the way between ranks, from made-up facts."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.engine.meeting import (
    Place,
    ensure_default_group,
    open_process_group,
    place,
    started_as_ranks,
    wait_for_all,
)
from infinity.engine.transport import Port, RankFacts, ask_program, describe_transport, gpu_links, rank_facts
from infinity.errors import ConfigError
from launch import outputs, run_ranks

TOGETHER = """
    from infinity.engine.meeting import open_process_group
    ranks = open_process_group(torch.device("cpu"), timeout_seconds=60)
    assert (ranks.rank, ranks.num_ranks, ranks.local_rank) == (rank, num_ranks, rank)
    said = {"transport": ranks.transport, "hosts": ranks.hosts, "reduction": ranks.reduction, "sums": {}}

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        part = torch.arange(5).to(dtype) + 10 * rank
        whole = torch.full((5 * num_ranks,), 99, dtype=dtype)
        ranks.all_gather_into(whole, part)
        assert whole.tolist() == [10 * other + place for other in range(num_ranks) for place in range(5)]
    ranks.all_gather_into(torch.empty(0), torch.empty(0))
    ranks.reduce_scatter_into(torch.empty(0), torch.empty(0))

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        size = (1 << 17) + 3  # more than a piece
        generator = torch.Generator().manual_seed(rank)
        whole = torch.randn(size * num_ranks, generator=generator).to(dtype)
        before, part = whole.clone(), torch.empty(size, dtype=dtype)
        ranks.reduce_scatter_into(part, whole)
        assert torch.equal(whole, before)
        expected = None
        for other in range(num_ranks):
            generator = torch.Generator().manual_seed(other)
            theirs = torch.randn(size * num_ranks, generator=generator).to(dtype)[rank * size : (rank + 1) * size]
            wide = theirs.float() if dtype in (torch.bfloat16, torch.float16) else theirs
            expected = wide.clone() if expected is None else expected + wide
        assert torch.equal(part, expected.to(dtype)), dtype

    words = [{"rank": other, "text": "ü" * other * 1000} for other in range(num_ranks)]
    assert ranks.exchange(words[rank]) == words
    ranks.barrier()
    ranks.close()
    ranks.close()
    again = open_process_group(torch.device("cpu"), timeout_seconds=60)  # another engine of this process
    assert again.exchange(rank) == list(range(num_ranks))
    again.close()
    print(json.dumps(said))
"""


def test_three_ranks_gather_sum_and_talk() -> None:
    said = [json.loads(output.splitlines()[-1]) for output in outputs(run_ranks(TOGETHER, 3))]
    assert said[0] == said[1] == said[2]
    assert said[0]["transport"].startswith("gloo over TCP (")
    assert "sum in the order of ranks" in said[0]["reduction"]
    assert len(said[0]["hosts"]) == 3


def test_a_group_of_the_users_own_is_used_and_left() -> None:
    script = """
        import torch.distributed as dist
        from infinity.engine.meeting import open_process_group
        dist.init_process_group("gloo")
        with_infinity = open_process_group(torch.device("cpu"))
        whole = torch.empty(num_ranks)
        with_infinity.all_gather_into(whole, torch.tensor([float(rank)]))
        assert whole.tolist() == [0.0, 1.0]
        with_infinity.close()
        dist.all_reduce(whole)
        assert whole.tolist() == [0.0, 2.0]
        dist.destroy_process_group()
    """
    outputs(run_ranks(script))


def test_the_default_group_is_made_for_who_asks_torch() -> None:
    script = """
        import torch.distributed as dist
        from infinity.engine.meeting import ensure_default_group, place, wait_for_all
        before = place()
        assert not dist.is_initialized()
        assert ensure_default_group(torch.device("cpu"), seconds=60) == before == (rank, num_ranks, rank)
        assert ensure_default_group(torch.device("cpu"), seconds=60) == before
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, num_ranks, "gloo")
        if rank == 1:
            time.sleep(0.5)
            open(os.environ["MARK"], "w").close()
        wait_for_all()
        assert os.path.exists(os.environ["MARK"])
        if rank == 0:
            os._exit(3)
        try:
            wait_for_all()
        except Exception as error:
            print(type(error).__name__, error)
    """
    with tempfile.TemporaryDirectory() as directory:
        _, other = run_ranks(script, MARK=f"{directory}/mark")
    assert other.output.startswith("RanksError rank 1 of 2, barrier: another rank has ended"), other.complaints


def test_a_process_that_is_alone_has_a_default_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert place() == Place(0, 1, 0)
    wait_for_all()
    try:
        assert ensure_default_group(torch.device("cpu"), seconds=60) == Place(0, 1, 0)
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
        wait_for_all()
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_dies_ends_the_others_waits_with_its_phase() -> None:
    script = """
        from infinity.engine.meeting import open_process_group
        from infinity.errors import RanksError
        ranks = open_process_group(torch.device("cpu"), timeout_seconds=600)
        ranks.barrier()
        if rank == 0:
            os._exit(3)
        began = time.monotonic()
        for phase in ("barrier", "gather"):
            try:
                if phase == "barrier":
                    ranks.barrier("waiting for its turn")
                else:
                    ranks.all_gather_into(torch.empty(num_ranks), torch.empty(1), phase="gathering block 3")
            except RanksError as error:
                print(error)
        assert time.monotonic() - began < 60
        ranks.close()
    """
    began = time.monotonic()
    dead, other = run_ranks(script)
    assert time.monotonic() - began < 100
    assert (dead.status, other.status) == (3, 0), other.complaints
    barrier, gather = other.output.splitlines()[-2:]
    expected = "another rank has ended, or closed its engine; see what it said"
    assert f"rank 1 of 2, waiting for its turn: {expected}" in barrier
    assert "rank 1 of 2, gathering block 3: another rank has ended" in gather


def test_a_rank_that_is_late_is_said() -> None:
    script = """
        import signal
        from infinity.engine.meeting import open_process_group
        from infinity.errors import RanksError
        ranks = open_process_group(torch.device("cpu"), timeout_seconds=60, patience_seconds=2)
        pids = ranks.exchange(os.getpid())
        if rank == 1:
            signal.pause()
        try:
            ranks.barrier("starting to train")
        except RanksError as error:
            print(error)
        os.kill(pids[1], signal.SIGKILL)
        os._exit(0)
    """
    waiting, late = run_ranks(script)
    assert late.status == -signal.SIGKILL
    assert "rank 0 of 2, starting to train: a rank has ended or did not come in time" in waiting.output
    assert "anks 1 failed" in waiting.output  # gloo knows which


def test_ranks_that_never_come_are_not_waited_for_long() -> None:
    script = """
        from infinity.engine.meeting import open_process_group
        from infinity.errors import RanksError
        if rank == 0:
            try:
                open_process_group(torch.device("cpu"), timeout_seconds=2)
            except RanksError as error:
                print(error)
            os._exit(0)
    """
    first, _ = run_ranks(script)
    assert "rank 0 of 2, meeting at 127.0.0.1:" in first.output
    assert "not all ranks came in time (2 s)" in first.output


def test_without_torchrun_there_is_nobody_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not started_as_ranks()
    with pytest.raises(ConfigError, match=r"RANK, WORLD_SIZE.*start with torchrun"):
        open_process_group(torch.device("cpu"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not started_as_ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert started_as_ranks()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match=r"variable WORLD_SIZE: expected a number, got 'two'; start with torchrun"):
        started_as_ranks()
    monkeypatch.setenv("LOCAL_RANK", "")
    with pytest.raises(ConfigError, match=r"variable LOCAL_RANK: expected a number, got ''"):
        open_process_group(torch.device("cpu"))


# The way between ranks.


def facts(host: str = "a", gpu: int | None = 0, **changes: Any) -> RankFacts:
    base = RankFacts(
        host=host, interface="eth0", gpu=gpu, links={}, peers=True, ports=[], peer_memory=False, environment={}
    )
    base.update(changes)  # type: ignore[typeddict-item]
    return base


def pair(link: str, **changes: Any) -> list[RankFacts]:
    """Two GPUs of one machine."""
    return [facts(gpu=0, links={"0": "X", "1": link}, **changes), facts(gpu=1, links={"0": link, "1": "X"}, **changes)]


def hosts(*adapters: tuple[str, str], **changes: Any) -> list[RankFacts]:
    """Two machines with these RDMA adapters each."""
    ports = [Port(adapter=adapter, link=link) for adapter, link in adapters]
    return [facts(host, ports=ports, **changes) for host in ("a", "b")]


IB, ROCE = ("mlx5_0", "InfiniBand"), ("mlx5_1", "Ethernet")
UNKNOWN_GDR = "(whether with GPUDirect RDMA is unknown: nvidia_peermem is not loaded, DMA-BUF does not show)"


@pytest.mark.parametrize(
    ("backend", "ranks", "words"),
    [
        ("gloo", hosts(), "gloo over TCP (eth0)"),
        ("gloo", [facts(interface=None)], "gloo over TCP (interface unknown)"),
        ("gloo", hosts(environment={"GLOO_SOCKET_IFNAME": "ib0"}), "gloo over TCP (ib0)"),
        ("xccl", hosts(), "xccl, transport unknown"),
        ("nccl", pair("NV18"), "NCCL over NVLink"),
        ("nccl", pair("NV4", peers=None), "NCCL, probably over NVLink"),
        ("nccl", pair("PHB"), "NCCL over PCIe"),
        ("nccl", pair("PIX", environment={"NCCL_P2P_LEVEL": "SYS"}), "NCCL, probably over PCIe"),
        ("nccl", pair("SYS"), "NCCL, probably over PCIe or host memory (GPUs on different PCIe roots)"),
        ("nccl", pair("NV4", peers=False), "NCCL over host memory (no GPU reaches another's memory)"),
        ("nccl", pair("NV4", environment={"NCCL_P2P_DISABLE": "1"}), "NCCL over host memory (NCCL_P2P_DISABLE)"),
        ("nccl", pair("NV4", environment={"NCCL_P2P_LEVEL": "LOC"}), "NCCL over host memory (NCCL_P2P_LEVEL)"),
        (
            "nccl",
            pair("NV4", environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
            "NCCL, probably over the network within one machine (NCCL_P2P_DISABLE; NCCL_SHM_DISABLE)",
        ),
        (
            "nccl",
            [facts(gpu=None), facts(gpu=None)],
            "NCCL within one machine, transport unknown (nvidia-smi topo -m does not say)",
        ),
        ("nccl", hosts(IB, peer_memory=True), "NCCL over InfiniBand mlx5_0 with GPUDirect RDMA"),
        ("nccl", hosts(IB), f"NCCL over InfiniBand mlx5_0 {UNKNOWN_GDR}"),
        ("nccl", hosts(ROCE, peer_memory=True), "NCCL over RoCE mlx5_1 with GPUDirect RDMA"),
        ("nccl", hosts(IB, ROCE, peer_memory=True), "NCCL over RDMA mlx5_0, mlx5_1 with GPUDirect RDMA"),
        (
            "nccl",
            hosts(IB, ROCE, peer_memory=True, environment={"NCCL_IB_HCA": "^mlx5_0:1"}),
            "NCCL over RoCE mlx5_1 with GPUDirect RDMA",
        ),
        (
            "nccl",
            hosts(IB, ROCE, peer_memory=True, environment={"NCCL_IB_HCA": "=mlx5_0"}),
            "NCCL over InfiniBand mlx5_0 with GPUDirect RDMA",
        ),
        (
            "nccl",
            hosts(IB, peer_memory=True, environment={"NCCL_NET_GDR_LEVEL": "LOC"}),
            "NCCL over InfiniBand mlx5_0 without GPUDirect RDMA",
        ),
        (
            "nccl",
            hosts(IB, peer_memory=True, environment={"NCCL_NET_GDR_LEVEL": "PIX"}),
            "NCCL over InfiniBand mlx5_0 probably with GPUDirect RDMA",
        ),
        ("nccl", hosts(IB, environment={"NCCL_IB_DISABLE": "1"}), "NCCL over TCP (probably eth0)"),
        ("nccl", [*hosts(IB), facts("c")], "NCCL over TCP (probably eth0)"),  # one host has none
        ("nccl", hosts(environment={"NCCL_SOCKET_IFNAME": "bond0"}), "NCCL over TCP (bond0)"),
        ("nccl", hosts(interface=None), "NCCL over TCP (interface unknown)"),
        ("nccl", hosts(IB, environment={"NCCL_NET": "AWS Libfabric"}), "NCCL over AWS Libfabric (NCCL_NET)"),
        ("nccl", hosts(IB, environment={"NCCL_NET": "Socket"}), "NCCL over TCP (probably eth0)"),
    ],
)
def test_the_way_between_ranks_is_said(backend: str, ranks: list[RankFacts], words: str) -> None:
    assert describe_transport(backend, ranks) == words
    assert describe_transport(backend, json.loads(json.dumps(ranks))) == words  # as they arrive


def test_facts_of_a_rank_come_from_the_system(tmp_path: Path) -> None:
    for adapter, state, link in [("mlx5_0", "4: ACTIVE", "InfiniBand"), ("mlx5_1", "1: DOWN", "Ethernet")]:
        port = tmp_path / "infiniband" / adapter / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{link}\n")
    (tmp_path / "modules/nvidia_peermem").mkdir(parents=True)
    seen = rank_facts(
        torch.device("cpu"),
        environment={"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "HOME": "/secret"},
        infiniband=tmp_path / "infiniband",
        modules=tmp_path / "modules",
    )
    assert seen["ports"] == [{"adapter": "mlx5_0", "link": "InfiniBand"}]
    assert (seen["peer_memory"], seen["gpu"], seen["links"], seen["peers"]) == (True, None, {}, None)
    assert seen["environment"] == {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    nothing = rank_facts(torch.device("cpu"), environment={}, infiniband=tmp_path / "x", modules=tmp_path / "x")
    assert (nothing["ports"], nothing["peer_memory"]) == ([], False)


TOPOLOGY = """
\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-15
GPU1\tNV18\t X \tSYS\t16-31
NIC0\tPIX\tSYS\t X
"""


def test_links_between_gpus_are_read_from_nvidia_smi() -> None:
    listing = "0, GPU-aaaa-bbbb\n1, GPU-cccc-dddd\n"
    answers = {"--query-gpu=index,uuid": listing, "topo": TOPOLOGY}

    def ask(command: Sequence[str]) -> str | None:
        return answers.get(command[1])

    assert gpu_links("cccc-dddd", ask) == (1, {"0": "NV18", "1": "X"})
    assert gpu_links("none-here", ask) == (None, {})
    assert gpu_links(None, ask) == (None, {})
    assert gpu_links("aaaa-bbbb", lambda command: listing if "topo" not in command else None) == (0, {})
    assert gpu_links("aaaa-bbbb", lambda command: None) == (None, {})
    assert ask_program(["/nothing/here"]) is None
    assert ask_program(["false"]) is None
    assert ask_program(["echo", "x"]) == "x\n"
