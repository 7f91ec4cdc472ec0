"""Which way the ranks' bytes go, in words: found from facts of every rank, since no library says it.

``rank_facts`` collects what one rank can see, as JSON holds it; ``describe_transport`` concludes from those of all.
NCCL decides by itself, by rules that these facts mostly settle. Where they do not, the words are "probably" or
"unknown".
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import psutil
import torch

_INFINIBAND = Path("/sys/class/infiniband")
_MODULES = Path("/sys/module")
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME")
_SMI_SECONDS = 10
_NEAR = {"PIX", "PXB", "PHB"}
"""How ``nvidia-smi topo`` calls pairs of GPUs on one PCIe root; others cross a socket or a bridge between roots."""


class Port(TypedDict):
    """An active port of an RDMA adapter; ``link`` is ``"InfiniBand"`` or ``"Ethernet"`` (then it is RoCE)."""

    adapter: str
    link: str


class RankFacts(TypedDict):
    """What one rank sees.

    ``host`` names the machine; ``interface`` is the one that the host's name leads to, or ``None``; ``gpu`` is the
    number that ``nvidia-smi topo`` gives to this rank's GPU, ``links`` its row there by number of the other GPU, and
    ``peers`` whether this GPU can reach the memory of every other that this rank sees, ``None`` where it sees none;
    ``peer_memory`` is whether a module for GPUDirect RDMA is loaded; ``environment`` has the variables that libraries
    are told with.
    """

    host: str
    interface: str | None
    gpu: int | None
    links: dict[str, str]
    peers: bool | None
    ports: list[Port]
    peer_memory: bool
    environment: dict[str, str]


def ask_program(command: Sequence[str]) -> str | None:
    """What a program prints; ``None`` where it is missing, fails or takes long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def rank_facts(
    device: torch.device,
    *,
    environment: Mapping[str, str] = os.environ,
    infiniband: Path = _INFINIBAND,
    modules: Path = _MODULES,
    ask: Callable[[Sequence[str]], str | None] = ask_program,
) -> RankFacts:
    """What this rank sees; nothing here fails.

    Args:
        device: this rank's.
        environment: variables.
        infiniband: where the kernel lists RDMA adapters.
        modules: where it lists its modules.
        ask: runs a program.
    """
    cuda = device.type == "cuda"
    gpu, links = gpu_links(_gpu_uuid(device), ask) if cuda else (None, {})
    return RankFacts(
        host=socket.gethostname(),
        interface=_interface(),
        gpu=gpu,
        links=links,
        peers=_reaches_peers(device) if cuda else None,
        ports=list(_ports(infiniband)),
        peer_memory=any((modules / name).is_dir() for name in _PEER_MEMORY_MODULES),
        environment={name: value for name, value in environment.items() if name.startswith(_VARIABLES)},
    )


def describe_transport(backend: str, facts: Sequence[RankFacts]) -> str:
    """The way between ranks, such as ``"gloo over TCP (eth0)"`` or ``"NCCL over NVLink"``.

    Args:
        backend: of ``torch.distributed``.
        facts: of every rank.
    """
    if backend == "gloo":
        return f"gloo over TCP ({_gloo_interface(facts)})"
    if backend != "nccl":
        return f"{backend}, transport unknown"
    if len({fact["host"] for fact in facts}) == 1:
        return _within_host(facts)
    return _between_hosts(facts)


def _gloo_interface(facts: Sequence[RankFacts]) -> str:
    names = {fact["environment"].get("GLOO_SOCKET_IFNAME") or fact["interface"] or "?" for fact in facts}
    return "interface unknown" if names == {"?"} else ", ".join(sorted(names))


def _within_host(facts: Sequence[RankFacts]) -> str:
    environment = _merged(facts)
    level = environment.get("NCCL_P2P_LEVEL", "").upper()
    if _is_on(environment, "NCCL_P2P_DISABLE") or level in {"LOC", "0"}:
        return _without_peers(environment, "NCCL_P2P_DISABLE" if level == "" else "NCCL_P2P_LEVEL")
    if any(fact["peers"] is False for fact in facts):
        return _without_peers(environment, "no GPU reaches another's memory")
    gpus = [fact["gpu"] for fact in facts]
    links = {
        fact["links"].get(str(gpu), "?") for fact in facts for gpu in gpus if gpu is None or gpu != fact["gpu"]
    } or {"?"}
    known = all(fact["peers"] for fact in facts) and not level
    if all(link.startswith("NV") for link in links):
        return "NCCL over NVLink" if known else "NCCL, probably over NVLink"
    if links <= _NEAR:
        return "NCCL over PCIe" if known else "NCCL, probably over PCIe"
    if "?" in links:
        return "NCCL within one machine, transport unknown (nvidia-smi topo -m does not say)"
    if any(link.startswith("NV") for link in links):
        return "NCCL, probably over NVLink, and over PCIe or host memory where a pair has none"
    return "NCCL, probably over PCIe or host memory (GPUs on different PCIe roots)"


def _without_peers(environment: Mapping[str, str], why: str) -> str:
    if _is_on(environment, "NCCL_SHM_DISABLE"):
        return f"NCCL, probably over the network within one machine ({why}; NCCL_SHM_DISABLE)"
    return f"NCCL over host memory ({why})"


def _between_hosts(facts: Sequence[RankFacts]) -> str:
    environment = _merged(facts)
    network = environment.get("NCCL_NET", "")
    if network and network.lower() not in {"ib", "socket"}:
        return f"NCCL over {network} (NCCL_NET)"
    ports = [_usable_ports(fact) for fact in facts]
    if network.lower() == "socket" or _is_on(environment, "NCCL_IB_DISABLE") or not all(ports):
        named = environment.get("NCCL_SOCKET_IFNAME")
        interfaces = {fact["interface"] or "?" for fact in facts}
        probable = "interface unknown" if "?" in interfaces else f"probably {', '.join(sorted(interfaces))}"
        return f"NCCL over TCP ({named or probable})"
    links = {port["link"] for some in ports for port in some}
    kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(links.pop(), "RDMA") if len(links) == 1 else "RDMA"
    adapters = sorted({port["adapter"] for some in ports for port in some})
    return f"NCCL over {kind} {', '.join(adapters)} {_gpu_direct(facts, environment)}"


def _gpu_direct(facts: Sequence[RankFacts], environment: Mapping[str, str]) -> str:
    level = environment.get("NCCL_NET_GDR_LEVEL", environment.get("NCCL_IB_GDR_LEVEL", "")).upper()
    if level in {"LOC", "0"}:
        return "without GPUDirect RDMA"
    if not all(fact["peer_memory"] for fact in facts):
        return "(whether with GPUDirect RDMA is unknown: nvidia_peermem is not loaded, DMA-BUF does not show)"
    return "with GPUDirect RDMA" if not level else "probably with GPUDirect RDMA"


def _usable_ports(fact: RankFacts) -> list[Port]:
    """Those that NCCL_IB_HCA leaves: prefixes of names, exact names after ``=``, all others after ``^``."""
    chosen = fact["environment"].get("NCCL_IB_HCA", "")
    match = re.fullmatch(r"(\^?)(=?)(.*)", chosen)
    names = [part.partition(":")[0] for part in match[3].split(",") if part] if match else []
    if match is None or not names:
        return fact["ports"]

    def is_named(adapter: str) -> bool:
        return any(adapter == name if match[2] else adapter.startswith(name) for name in names)

    return [port for port in fact["ports"] if is_named(port["adapter"]) != bool(match[1])]


def _merged(facts: Sequence[RankFacts]) -> dict[str, str]:
    """The variables of all ranks; one rank's word is enough to turn something off."""
    return {name: value for fact in reversed(facts) for name, value in fact["environment"].items()}


def _is_on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0") not in {"", "0"}


def _interface() -> str | None:
    """The interface with the address of the host's name, which gloo takes too; else the loopback, as gloo does."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return "lo"
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if any(entry.address.partition("%")[0] in addresses for entry in entries):
            return str(name)
    # All of 127.0.0.0/8 is the loopback, though it shows but one address.
    return "lo" if any(address.startswith("127.") for address in addresses) else None


def _ports(infiniband: Path) -> Iterator[Port]:
    for state in sorted(infiniband.glob("*/ports/*/state")):
        if "ACTIVE" in _read(state):
            yield Port(adapter=state.parents[2].name, link=_read(state.parent / "link_layer") or "unknown")


def _gpu_uuid(device: torch.device) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid).removeprefix("GPU-")


def _reaches_peers(device: torch.device) -> bool | None:
    """Whether this GPU can reach the memory of all others seen; ``None`` where it sees no other."""
    own = device.index or 0
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    return all(torch.cuda.can_device_access_peer(own, other) for other in others) if others else None


def gpu_links(uuid: str | None, ask: Callable[[Sequence[str]], str | None]) -> tuple[int | None, dict[str, str]]:
    """The number of a GPU, and how it is linked to the others, by their numbers."""
    listing = ask(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]) or ""
    numbers = {line.partition(", GPU-")[2].strip(): line.partition(",")[0] for line in listing.splitlines()}
    if uuid is None or uuid not in numbers:
        return None, {}
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", ask(["nvidia-smi", "topo", "-m"]) or "").splitlines()]
    columns = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    cells = next((row[1:] for row in rows if row[:1] == [f"GPU{numbers[uuid]}"] and row is not columns), [])
    links = {
        name.removeprefix("GPU"): cell for name, cell in zip(columns, cells, strict=False) if name.startswith("GPU")
    }
    return int(numbers[uuid]), links


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
