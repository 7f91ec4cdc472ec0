"""What is trained on, and with which model: shared by every way of training, so it imports nothing but the model."""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from infinity.train.model import GPTShape

GB = 1e9
LEARNING_RATE = 1e-4
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """What one step trains on.

    Attributes:
        batch_size: sequences.
        seq_length: tokens of each.
    """

    batch_size: int
    seq_length: int

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.seq_length}"

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.seq_length


def parse_work(text: str) -> Work:
    """``BATCHxSEQ``, for argparse."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected BATCHxSEQ, for example 8x128, got {text!r}")
    return Work(int(match[1]), int(match[2]))


def work_of_tokens(num_tokens: float, seq_length: int) -> Work:
    """About so many tokens, at least 8: whole sequences of ``seq_length`` or one shorter one, a multiple of 8."""
    if num_tokens >= seq_length:
        return Work(round(num_tokens / seq_length), seq_length)
    return Work(1, min(seq_length, max(8, round(num_tokens / 8) * 8)))


def batches(work: Work, vocab_size: int, seed: int = 0) -> Iterator[Batch]:
    """Random tokens and those that follow them, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, vocab_size, (work.batch_size, work.seq_length + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def add_model_flags(parser: argparse.ArgumentParser, shape: GPTShape) -> None:
    """``--layers`` and so on, with the sizes of ``shape`` as defaults."""
    parser.add_argument("--layers", type=int, default=shape.num_layers)
    parser.add_argument("--hidden", type=int, default=shape.hidden_size)
    parser.add_argument("--heads", type=int, default=shape.num_heads)
    parser.add_argument("--vocab", type=int, default=shape.vocab_size)
    parser.add_argument("--seq", type=int, default=shape.seq_length, help="longest sequence")


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags, among them ``--nvme`` and those of ``add_model_flags``; check these, and ``--work`` if it is one."""
    arguments = parser.parse_args(argv)
    if not arguments.nvme.is_dir():
        parser.error(f"--nvme: {arguments.nvme} is not a directory; give an existing one")
    if arguments.hidden % arguments.heads:
        parser.error(f"--hidden: expected a multiple of --heads {arguments.heads}, got {arguments.hidden}")
    if isinstance(arguments.work, Work) and arguments.work.seq_length > arguments.seq:
        parser.error(f"--work: sequences longer than --seq {arguments.seq}")
    return arguments


def shape_of(arguments: argparse.Namespace, *, recompute: bool = False) -> GPTShape:
    """The sizes that the flags give."""
    return GPTShape(arguments.layers, arguments.hidden, arguments.heads, arguments.seq, arguments.vocab, recompute)


def shape_fields(shape: GPTShape) -> dict[str, Any]:
    """For JSON."""
    return asdict(shape)


def end_on_sigterm() -> None:
    """Have SIGTERM unwind the stack as Ctrl-C does, so that what was written is deleted."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
