"""Text as bytes: where it comes from, what is held out, and the batches, the same for every trainer and every run."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.errors import ConfigError, storage_error

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and targets, both int64 of shape (batch, seq); the target is the byte that follows."""

_HELD_OUT_ONE_IN = 10
_SKIPPED_IN_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_BINARY_PROBE_BYTES = 8192
_REPAIR = "give a text file or a directory of text files"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text to learn from and text to be judged by.

    Attributes:
        train: uint8, one-dimensional.
        held_out: uint8, one-dimensional; none of it is in ``train``.
        source: where it came from, in words.
        num_files: how many files were read.
        truncated: whether the limit left some text unread.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    source: str
    num_files: int
    truncated: bool


def load_corpus(path: Path | None, *, limit_bytes: int, seq_length: int) -> Corpus:
    """Read text and divide it: every tenth file is held out, or of fewer than ten files the last tenth of the text.

    Args:
        path: a file, or a directory whose text files are taken in order of their names, hidden ones left out.
            ``None``: the sources of Python's standard library, without its tests.
        limit_bytes: read at most so many bytes, the first ones.
        seq_length: the length of sequence that each part must hold at least once.

    Raises:
        ConfigError: the path is missing, or there is too little text in it.
        StorageError: a file cannot be read.
    """
    files, source = _find_files(path)
    texts: list[bytes] = []
    num_bytes = 0
    truncated = False
    for file in files:
        if num_bytes == limit_bytes:
            truncated = True
            break
        text, was_cut = _read(file, limit_bytes - num_bytes)
        if len(files) > 1 and b"\0" in text[:_BINARY_PROBE_BYTES]:
            continue
        truncated |= was_cut
        texts.append(text)
        num_bytes += len(text)
    train, held_out = _divide(texts)
    shortest_bytes = min(len(train), len(held_out))
    if shortest_bytes <= seq_length:
        limit = f" within --data-limit {limit_bytes} bytes" if truncated else ""
        raise ConfigError(
            f"--data: the text in {source} is too short: {len(train)} bytes to train on and {len(held_out)} held out"
            f"{limit}, but --seq {seq_length} needs {seq_length + 1} of each; give more text or a smaller --seq"
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out), source, len(texts), truncated)


def training_batches(
    text: torch.Tensor,
    *,
    batch_size: int,
    seq_length: int,
    seed: int,
    num_skipped: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Batch]:
    """Yield batches for ever, each of sequences that start anywhere in the text, chosen by ``seed`` alone.

    Several ranks share one sequence of batches, each ``num_ranks`` times as large: the r-th slice is the r-th rank's.

    Args:
        text: where they are cut out of.
        batch_size: sequences in each.
        seq_length: tokens in each sequence.
        seed: which ones.
        num_skipped: how many of the first are left out: a run before has trained on them.
        rank: whose.
        num_ranks: of how many.
    """
    generator = torch.Generator().manual_seed(seed)
    for number in itertools.count():
        starts = torch.randint(len(text) - seq_length, (num_ranks * batch_size,), generator=generator)
        if number >= num_skipped:
            yield _cut(text, starts[rank * batch_size :][:batch_size], seq_length)


def held_out_batches(
    text: torch.Tensor, *, batch_size: int, seq_length: int, num_batches: int, rank: int = 0, num_ranks: int = 1
) -> list[Batch]:
    """Batches of sequences spread evenly over the text; each of several ranks has as many, and others."""
    count = num_ranks * num_batches * batch_size
    starts = torch.arange(count) * (len(text) - seq_length) // count
    chunks = torch.split(starts, batch_size)[rank * num_batches :][:num_batches]
    return [_cut(text, chunk, seq_length) for chunk in chunks]


def _cut(text: torch.Tensor, starts: torch.Tensor, seq_length: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(seq_length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _find_files(path: Path | None) -> tuple[list[Path], str]:
    """The files to read, sorted, and what they are in words."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(
            file
            for file in root.rglob("*.py")
            if file.is_file() and _SKIPPED_IN_STANDARD_LIBRARY.isdisjoint(file.relative_to(root).parts)
        )
        return files, f"Python's standard library ({root})"
    try:
        if path.resolve().is_relative_to("/proc") or path.resolve().is_relative_to("/sys"):
            raise ConfigError(f"--data: {path} is the kernel's and holds no text; {_REPAIR}")
        if path.is_dir():
            files = sorted(
                file
                for file in path.rglob("*")
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            return files, f"directory {path}"
        if path.is_file():
            return [path], f"file {path}"
        problem = _why_not_there(path)
    except OSError as error:
        problem = f"cannot be looked at ({error.strerror})"
    raise ConfigError(f"--data: {path} {problem}; {_REPAIR}")


def _why_not_there(path: Path) -> str:
    if path.exists():
        return "is neither a file nor a directory"
    if path.is_symlink():
        return f"is a link to {path.readlink()}, which does not exist"
    for parent in reversed(path.parents):
        if parent.exists() and not parent.is_dir():
            return f"does not exist, because {parent} is a file"
    return "does not exist"


def _read(file: Path, limit_bytes: int) -> tuple[bytes, bool]:
    """The first bytes of a file, and whether there were more."""
    try:
        with file.open("rb") as opened:
            text = opened.read(limit_bytes)
            return text, bool(opened.read(1))
    except OSError as error:
        raise storage_error("reading the text for --data", error, path=file) from error


def _divide(texts: list[bytes]) -> tuple[bytes, bytes]:
    if len(texts) < _HELD_OUT_ONE_IN:
        text = b"".join(texts)
        split = len(text) - len(text) // _HELD_OUT_ONE_IN
        return text[:split], text[split:]
    train = [text for number, text in enumerate(texts, start=1) if number % _HELD_OUT_ONE_IN]
    return b"".join(train), b"".join(texts[_HELD_OUT_ONE_IN - 1 :: _HELD_OUT_ONE_IN])


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
