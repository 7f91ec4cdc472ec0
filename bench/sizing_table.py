"""What ranks keep and move, and how fast a step can be at best, by formula: for models up to 1T parameters, 512 ranks.

Nothing is measured. Bytes are those of ``infinity/engine/traffic.py``: bf16 with AdamW, weights as two planes (14 bytes
per parameter), one backward per step, every unit gathered twice. Of what moves through NVMe, that which moves most
stays in host memory as far as there is room. A step takes at least as long as each of: its arithmetic, 6 operations per
parameter and token (8 with recomputation); what is sent over the network; what is read and written on NVMe. Latencies,
activations and their memory are not in it.

    python bench/sizing_table.py [--tokens N] [--tflops X] [--network-gb-s X] [--nvme-gb-s X] [--ram-gb X]

The output with the defaults is part of ``docs/distributed.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from infinity.engine.traffic import DIVIDED, State, Work, kept, moved, state_for
from infinity.train.model import GPTShape

GB = 1e9
VOCAB_SIZE, SEQ_LENGTH = 50304, 2048
NUM_RANKS = (1, 8, 64, 512)
GATHERED_BLOCKS = 3
"""What device memory holds at least: the block that computes and, with ``prefetch=2``, the next two."""

SHAPES = {
    "1.4B": (24, 2048),
    "6.9B": (32, 4096),
    "13B": (40, 5120),
    "65B": (80, 8192),
    "175B": (96, 12288),
    "1T": (128, 25600),
}
"""Layers and width of a GPT, by its parameters."""

COMPARED = ("13B", 8)
"""Model and ranks with which stages are compared."""


def shape_of(name: str) -> GPTShape:
    """The sizes of one of ``SHAPES``."""
    layers, hidden = SHAPES[name]
    return GPTShape(layers, hidden, hidden // 128, SEQ_LENGTH, VOCAB_SIZE)


def block_parameters(shape: GPTShape) -> int:
    """Elements of a block's parameters."""
    return 12 * shape.hidden_size**2 + 13 * shape.hidden_size


def num_parameters(shape: GPTShape) -> int:
    """Elements of all parameters; the head is tied to the embedding."""
    embedded = shape.vocab_size + shape.seq_length + 2
    return shape.num_layers * block_parameters(shape) + embedded * shape.hidden_size


def size(num_bytes: float) -> str:
    """Bytes as GB: three digits or so."""
    return f"{num_bytes / GB:.0f}" if num_bytes >= 100 * GB else f"{num_bytes / GB:.{1 if num_bytes >= GB else 2}f}"


def seconds(value: float) -> str:
    """A time, to three digits or so."""
    return f"{value:.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


class Rates:
    """What one rank has, and what it can do in a second."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tokens = arguments.tokens
        self.flops = arguments.tflops * 1e12
        self.network = arguments.network_gb_s * GB
        self.nvme = arguments.nvme_gb_s * GB
        self.ram_bytes = round(arguments.ram_gb * GB)

    def __str__(self) -> str:
        return (
            f"Each rank: {self.tokens:,} tokens per step, {self.flops / 1e12:g} TFLOP/s, "
            f"sends {self.network / GB:g} GB/s, NVMe {self.nvme / GB:g} GB/s (both ways together), "
            f"{self.ram_bytes / GB:g} GB of host memory."
        )


def cells(state: State, parameters: int, stage: int, ranks: int, rates: Rates) -> list[str]:
    """What one rank keeps and moves, and the least that a step takes, bound by bound."""
    step = moved(state, stage, ranks, Work(num_gathers=2))
    read, written = step.beyond(rates.ram_bytes)
    computing = 6 * parameters * rates.tokens / rates.flops
    sending, storing = sum(step.sent.values()) / rates.network, (read + written) / rates.nvme
    return [
        size(sum(kept(state, stage, ranks).values())),
        size(sum(step.sent.values())),
        f"{size(step.nvme_read)} + {size(step.nvme_written)}",
        f"{size(read)} + {size(written)}",
        *(seconds(value) for value in (computing, sending, storing)),
        seconds(max(computing, sending, storing)),
        f"{ranks * rates.tokens / max(computing, sending, storing):,.0f}",
    ]


HEADINGS = (
    "kept per rank", "sent", "NVMe, nothing stays", "NVMe, with RAM", "compute s", "network s", "NVMe s",
    "step s, least", "tokens/s, most",
)  # fmt: skip


def state_of(name: str) -> tuple[State, int]:
    """The state of one of ``SHAPES``, and its parameters."""
    parameters = num_parameters(shape_of(name))
    return state_for(parameters, compute_dtype=torch.bfloat16, in_planes=True), parameters


def models_table(rates: Rates) -> Iterator[list[str]]:
    """Stage 3, by model and number of ranks."""
    yield ["parameters", "ranks", f"{GATHERED_BLOCKS} blocks on the device", *HEADINGS]
    for name in SHAPES:
        state, parameters = state_of(name)
        for ranks in NUM_RANKS:
            blocks = GATHERED_BLOCKS * 2 * block_parameters(shape_of(name))
            yield [name, str(ranks), size(blocks), *cells(state, parameters, 3, ranks, rates)]


def stages_table(rates: Rates) -> Iterator[list[str]]:
    """The stages, for one model and one number of ranks."""
    name, ranks = COMPARED
    state, parameters = state_of(name)
    yield ["stage", "divided", *HEADINGS]
    for stage, divided in DIVIDED.items():
        yield [str(stage), ", ".join(divided) or "nothing", *cells(state, parameters, stage, ranks, rates)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its cells aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> Rates:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of one rank in a step")
    parser.add_argument("--tflops", type=float, default=400, help="what a rank computes, in 1e12 operations per second")
    parser.add_argument("--network-gb-s", type=float, default=25, help="what a rank sends, in 1e9 bytes per second")
    parser.add_argument("--nvme-gb-s", type=float, default=6, help="what a rank reads and writes, together")
    parser.add_argument("--ram-gb", type=float, default=128, help="host memory of a rank, in 1e9 bytes")
    return Rates(parser.parse_args(arguments))


def main() -> None:
    rates = parse()
    name, ranks = COMPARED
    print(f"{rates} GB = 1e9 bytes, per rank and step; NVMe: read + written.\n")
    print(f"Stage 3:\n\n{markdown(list(models_table(rates)))}\n")
    print(f"{name} on {ranks} ranks, by stage:\n\n{markdown(list(stages_table(rates)))}")


if __name__ == "__main__":
    main()
