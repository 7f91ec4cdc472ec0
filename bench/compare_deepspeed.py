"""infinity against DeepSpeed ZeRO-Infinity: the same model, weights, data and precision, all state on NVMe.

For each size and each of DeepSpeed's settings, a process of either trains in turns, so that a drift of the machine hits
both alike. Either uses a fused AdamW: DeepSpeed its own, infinity PyTorch's. Times are medians of at least five steps,
after two that do not count; memory is the peak of each process: infinity's from its first to its last moment,
DeepSpeed's from its first step on. DeepSpeed's best setting is the one with the fastest step; every setting counts for
its leanest.

DeepSpeed gets an environment of its own (``--cache DIR`` keeps it); where that cannot be made, this says why and ends
with exit code 0. Otherwise the exit code is 1 if a target is missed.

How many tokens a step has is chosen, unless ``--work`` says it, such that forward and backward take about as long as
the disk needs for 24 bytes per parameter, at most 2 sequences of 128: on processors without bf16 arithmetic more would
time the same slow kernels twice.

    python bench/compare_deepspeed.py --nvme DIR [--sizes 122M,351M,1.1B] [--cache DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib_checks import Check, print_checks, require_room
from lib_disk import Bandwidth, measure_bandwidth, median_bandwidth
from lib_peer_environment import NEEDS, REQUIREMENTS, PeerEnvironment, UnavailableError
from lib_training import BlockClock, machine, make_engine, num_parameters, smallest_budgets
from lib_work import GB, Work, end_on_sigterm, parse_work, shape_fields, spread
from lib_worker import Worker, WorkerError

from infinity.config import Config
from infinity.train.model import GPTShape

SEQ_LENGTH = 128
VOCAB_SIZE = 256
MOST_TOKENS = 2 * SEQ_LENGTH
DISK_BYTES = 12
"""Read and written per parameter: what the arithmetic of a step is to take as long as."""

SIZES = {
    "122M": GPTShape(11, 960, 15, SEQ_LENGTH, VOCAB_SIZE),
    "351M": GPTShape(22, 1152, 18, SEQ_LENGTH, VOCAB_SIZE),
    "1.1B": GPTShape(22, 2048, 32, SEQ_LENGTH, VOCAB_SIZE, recompute=True),
}
STATE_SHARE = 0.12
"""Of its state, as infinity's host budget."""

NUM_WARMING = 2
INFINITY_FILE_BYTES, DEEPSPEED_FILE_BYTES, DEEPSPEED_MEMORY_BYTES = 22, 20, 10
"""Per parameter, for the room that is asked for."""

ANSWER_SECONDS = 3600.0


def parse_size(text: str) -> tuple[str, GPTShape]:
    """One of ``SIZES`` by name, or ``LAYERSxHIDDENxHEADS``; for argparse."""
    if text in SIZES:
        return text, SIZES[text]
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[2]) % int(match[3]):
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(SIZES)} or LAYERSxHIDDENxHEADS, HIDDEN a multiple of HEADS, got {text!r}"
        )
    return text, GPTShape(int(match[1]), int(match[2]), int(match[3]), SEQ_LENGTH, VOCAB_SIZE)


def peer_settings(shape: GPTShape, parameters: int, directory: Path) -> dict[str, dict[str, Any]]:
    """DeepSpeed's configurations by name, all with optimizer states on NVMe, most with parameters there too.

    Defaults hold half a gigabyte of buckets and buffers that no model of these sizes uses. Tuned, buffers have the size
    of the largest parameter, sub-groups are an eighth of the model, and I/O goes in large blocks by several threads.
    """
    largest = max(4 * shape.hidden_size**2, shape.vocab_size * shape.hidden_size)
    sub_group = max(largest, parameters // 8)
    aio = {
        "block_size": 8 << 20, "queue_depth": 16, "intra_op_parallelism": 2,
        "single_submit": False, "overlap_events": True,
    }  # fmt: skip

    def setting(*, params: bool, pipelined: bool) -> dict[str, Any]:
        optimizer = {
            "device": "nvme", "nvme_path": str(directory), "pin_memory": False,
            "buffer_count": 12 if pipelined else 4, "pipeline_read": pipelined, "pipeline_write": pipelined,
        }  # fmt: skip
        zero: dict[str, Any] = {
            "stage": 3, "offload_optimizer": optimizer, "sub_group_size": sub_group,
            "contiguous_gradients": True, "overlap_comm": False, "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 4 * largest,
            "stage3_max_reuse_distance": 4 * largest, "stage3_param_persistence_threshold": 10_000,
        }  # fmt: skip
        if params:
            zero["offload_param"] = {
                "device": "nvme", "nvme_path": str(directory), "pin_memory": False,
                "buffer_count": 12, "buffer_size": largest, "max_in_cpu": 0,
            }  # fmt: skip
        return {"zero_optimization": zero, "aio": aio}

    return {
        "all on NVMe, tuned": setting(params=True, pipelined=False),
        "all on NVMe, tuned, pipelined": setting(params=True, pipelined=True),
        "optimizer on NVMe, tuned": setting(params=False, pipelined=False),
        "optimizer on NVMe, tuned, pipelined": setting(params=False, pipelined=True),
    }


@dataclass
class Pair:
    """Steps of both, taken in turns, with one of DeepSpeed's settings."""

    setting: str
    own: list[list[float]] = field(default_factory=list)
    peer: list[list[float]] = field(default_factory=list)
    peer_losses: list[float] = field(default_factory=list)
    peer_rss_bytes: int = 0
    peer_start_seconds: float = 0.0
    failure: str | None = None

    @property
    def own_seconds(self) -> list[float]:
        """All of infinity's steps."""
        return [seconds for turn in self.own for seconds in turn]

    @property
    def peer_seconds(self) -> list[float]:
        """All of DeepSpeed's steps."""
        return [seconds for turn in self.peer for seconds in turn]

    @property
    def speedup(self) -> float:
        """DeepSpeed's step over infinity's: the median over turns."""
        return statistics.median(
            statistics.median(peer) / statistics.median(own) for own, peer in zip(self.own, self.peer, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        if self.failure is not None:
            return {"setting": self.setting, "failure": self.failure}
        return {
            "setting": self.setting,
            "deepspeed_step_seconds": spread(self.peer_seconds),
            "infinity_step_seconds": spread(self.own_seconds),
            "speedup": self.speedup,
            "num_steps": len(self.peer_seconds),
            "deepspeed_peak_rss_bytes": self.peer_rss_bytes,
            "deepspeed_start_seconds": self.peer_start_seconds,
            "deepspeed_losses": self.peer_losses,
        }


class SizeComparison:
    """One size of model: infinity's process, and one of DeepSpeed's after the other beside it."""

    def __init__(
        self, shape: GPTShape, work: Work, config: dict[str, Any], environment: PeerEnvironment, scratch: Path
    ) -> None:
        self._shape, self._work, self._config = shape, work, config
        self._environment, self._scratch = environment, scratch
        self._log = environment.log
        self.own_rss_bytes = 0
        self.own_losses: list[float] = []

    def run(self, settings: dict[str, dict[str, Any]], num_rounds: int) -> list[Pair]:
        """Compare with each setting."""
        command = [sys.executable, str(Path(__file__).with_name("infinity_worker.py")), json.dumps(self._settings())]
        with Worker(command, self._log, seconds=ANSWER_SECONDS) as own:
            self.ready = own.ready
            warm = own.ask({"steps": NUM_WARMING, "settling": NUM_WARMING}, seconds=ANSWER_SECONDS)
            self.own_losses += warm["losses"]
            pairs = []
            for name, setting in settings.items():
                pair = Pair(name)
                try:
                    self._compare(own, pair, setting, num_rounds)
                except WorkerError as error:
                    pair.failure = str(error)
                pairs.append(pair)
                print(f"  {name}: {pair.failure or f'{pair.speedup:.2f} x'}", file=sys.stderr, flush=True)
            return pairs

    def _compare(self, own: Worker, pair: Pair, setting: dict[str, Any], num_rounds: int) -> None:
        directory = self._scratch / "deepspeed"
        directory.mkdir(exist_ok=True)
        settings = {
            "shape": shape_fields(self._shape),
            "work": [self._work.batch_size, self._work.seq_length],
            "deepspeed": setting,
            "rendezvous": str(directory / "rendezvous"),
        }
        command = [str(self._environment.python), str(Path(__file__).with_name("deepspeed_worker.py"))]
        try:
            with Worker(
                [*command, json.dumps(settings)], self._log, seconds=ANSWER_SECONDS,
                environment=self._environment.variables(),
            ) as peer:  # fmt: skip
                pair.peer_start_seconds = peer.ready["start_seconds"]
                warm = peer.ask({"steps": NUM_WARMING, "settling": NUM_WARMING}, seconds=ANSWER_SECONDS)
                pair.peer_losses += warm["losses"]
                for number in range(num_rounds):
                    if number % 2:
                        self._peer_turn(peer, pair)
                        self._own_turn(own, pair)
                    else:
                        self._own_turn(own, pair)
                        self._peer_turn(peer, pair)
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # it leaves its files behind

    def _own_turn(self, own: Worker, pair: Pair) -> None:
        answer = own.ask({"steps": 2, "settling": 1}, seconds=ANSWER_SECONDS)
        pair.own.append(answer["seconds"])
        self.own_losses += answer["losses"]
        self.own_rss_bytes = max(answer["peak_rss_bytes"], own.ready["start_rss_bytes"])

    def _peer_turn(self, peer: Worker, pair: Pair) -> None:
        answer = peer.ask({"steps": 1, "settling": 0}, seconds=ANSWER_SECONDS)
        pair.peer.append(answer["seconds"])
        pair.peer_losses += answer["losses"]
        pair.peer_rss_bytes = answer["peak_rss_bytes"]

    def _settings(self) -> dict[str, Any]:
        return {
            "shape": shape_fields(self._shape),
            "work": [self._work.batch_size, self._work.seq_length],
            "precision": "bf16",
            "fused": True,
            "config": self._config,
        }


def size_checks(name: str, pairs: Sequence[Pair], own_rss_bytes: int, own_losses: Sequence[float]) -> list[Check]:
    """The bars of one size; that a setting of DeepSpeed's runs is one where none does."""
    ran = [pair for pair in pairs if pair.failure is None]
    if not ran:
        return [Check(f"{name}: DeepSpeed's settings that run", 0, ">=", 1, f"of {len(pairs)}")]
    best = min(ran, key=lambda pair: statistics.median(pair.peer_seconds))
    leanest = min(pair.peer_rss_bytes for pair in ran)
    apart = max(
        abs(own - peer) / abs(own) for own, peer in zip(own_losses, best.peer_losses, strict=False)
    )  # the same training: not bitwise, its master weights begin rounded
    return [
        Check(f"{name}: DeepSpeed's best step ({best.setting}) / infinity's", best.speedup, ">=", 2.0),
        Check(f"{name}: infinity's peak RSS / that setting's", own_rss_bytes / best.peer_rss_bytes, "<=", 1 / 3),
        Check(f"{name}: infinity's peak RSS / DeepSpeed's leanest", own_rss_bytes / leanest, "<=", 1.0),
        Check(f"{name}: losses apart, at most", apart, "<=", 0.05, "of the loss"),
    ]


def choose_work(shape: GPTShape, parameters: int, disk: Bandwidth) -> Work:
    """As many tokens as take about as long as the disk needs, at most two sequences, one where it recomputes."""
    moved = DISK_BYTES * parameters
    most = SEQ_LENGTH if shape.recompute else MOST_TOKENS
    return BlockClock(shape, "bf16").work(disk.seconds(moved, moved), shape.seq_length, most)


def infinity_fields(shape: GPTShape, directory: Path) -> dict[str, Any]:
    """Infinity's budgets: a share of its state, and device memory for a few units."""
    fields = {"device": "cpu", "nvme": str(directory), "accumulation_steps": 1}
    hbm, ram = smallest_budgets(shape, Config(**fields, precision="bf16"))
    with make_engine(shape, Config(**fields, precision="bf16", hbm=3 * hbm, ram=ram)) as engine:
        state_bytes = engine.state_bytes
    return fields | {"hbm": 3 * hbm, "ram": max(ram, int(STATE_SHARE * state_bytes))}


def compare_size(
    name: str, shape: GPTShape, arguments: argparse.Namespace, environment: PeerEnvironment, scratch: Path
) -> tuple[dict[str, Any], list[Check]]:
    """One size; its document and its bars."""
    parameters = num_parameters(shape)
    require_room(
        scratch,
        disk_bytes=(INFINITY_FILE_BYTES + DEEPSPEED_FILE_BYTES) * parameters + GB,
        memory_bytes=DEEPSPEED_MEMORY_BYTES * parameters + 2 * GB,
    )
    own = scratch / "infinity"
    own.mkdir()
    try:
        config = infinity_fields(shape, own)
        disk = median_bandwidth([measure_bandwidth(own, Config(**config)) for _ in range(3)])
        work = arguments.work or choose_work(shape, parameters, disk)
        comparison = SizeComparison(shape, work, config, environment, scratch)
        settings = peer_settings(shape, parameters, scratch / "deepspeed")
        if arguments.quick:
            settings = dict(list(settings.items())[:1])
        pairs = comparison.run(settings, arguments.rounds)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    document = {
        "size": name,
        "parameters": parameters,
        "model": shape_fields(shape),
        "work": str(work),
        "disk_gb_s": {"read": disk.read, "write": disk.write, "both": disk.both},
        "infinity_budgets": {key: config[key] for key in ("hbm", "ram")},
        "infinity_state_bytes": comparison.ready["state_bytes"],
        "infinity_peak_rss_bytes": comparison.own_rss_bytes,
        "infinity_start_seconds": comparison.ready["start_seconds"],
        "infinity_losses": comparison.own_losses,
        "settings": [pair.as_dict() for pair in pairs],
    }
    return document, size_checks(name, pairs, comparison.own_rss_bytes, comparison.own_losses)


def print_size(document: dict[str, Any]) -> None:
    """One size for a person."""
    budgets = document["infinity_budgets"]
    print(
        f"\n{document['size']}: {document['parameters'] / 1e6:.1f}M parameters, bf16, {document['work']} tokens, disk "
        f"{document['disk_gb_s']['both']:.2f} GB/s both ways; infinity with hbm {budgets['hbm'] / 1e6:.0f} MB, ram "
        f"{budgets['ram'] / 1e6:.0f} MB: peak RSS {document['infinity_peak_rss_bytes'] / 1e6:.0f} MB, started in "
        f"{document['infinity_start_seconds']:.1f} s"
    )
    print(f"  {'DeepSpeed':38}{'step s':>20}{'infinity s':>20}{'times':>7}{'RSS MB':>8}{'start s':>9}")
    for row in document["settings"]:
        if "failure" in row:
            print(f"  {row['setting']:38} failed: {row['failure'].splitlines()[-1]}")
            continue
        peer, own = row["deepspeed_step_seconds"], row["infinity_step_seconds"]
        print(
            f"  {row['setting']:38}{peer['median']:7.2f} ({peer['min']:.2f}-{peer['max']:.2f})"
            f"{own['median']:7.2f} ({own['min']:.2f}-{own['max']:.2f}){row['speedup']:7.2f}"
            f"{row['deepspeed_peak_rss_bytes'] / 1e6:8.0f}{row['deepspeed_start_seconds']:9.1f}"
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, required=True, help="an existing directory on the disk to train on")
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")],
                        default=list(SIZES.items()),
                        help=f"some of {', '.join(SIZES)}, or LAYERSxHIDDENxHEADS; default those")  # fmt: skip
    parser.add_argument("--work", type=parse_work, help="BATCHxSEQ of every size; default: chosen by time")
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of each, for each setting")
    parser.add_argument("--quick", action="store_true", help="only the first of DeepSpeed's settings")
    parser.add_argument("--cache", type=Path, help="keep DeepSpeed's environment here; default: a temporary directory")
    parser.add_argument("--json", type=Path, help="write the document here")
    arguments = parser.parse_args(argv)
    if not arguments.nvme.is_dir():
        parser.error(f"--nvme: {arguments.nvme} is not a directory; give an existing one")
    if arguments.work is not None and arguments.work.seq_length > SEQ_LENGTH:
        parser.error(f"--work: expected sequences of at most {SEQ_LENGTH}, got {arguments.work}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print; 0 where every target is met or DeepSpeed cannot be had, else 1."""
    arguments = parse(argv)
    end_on_sigterm()
    checks: list[Check] = []
    documents = []
    with tempfile.TemporaryDirectory(prefix="infinity-deepspeed-") as temporary:
        environment = PeerEnvironment(arguments.cache or Path(temporary))
        print(f"DeepSpeed's environment in {arguments.cache or temporary}: {NEEDS}", flush=True)
        try:
            environment.prepare()
        except UnavailableError as error:
            print(f"skipped: {error}")
            return 0
        with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="infinity-deepspeed-") as scratch:
            for name, shape in arguments.sizes:
                document, bars = compare_size(name, shape, arguments, environment, Path(scratch))
                print_size(document)
                documents.append(document)
                checks += bars
    if arguments.json is not None:
        whole = {
            "machine": machine(),
            "deepspeed": REQUIREMENTS[0],
            "sizes": documents,
            "checks": [check.as_dict() for check in checks],
        }
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print_checks(checks)
    return 0 if all(check.met for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
