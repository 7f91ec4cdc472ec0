from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.train.data import Corpus, held_out_batches, load_corpus, training_batches

TEXT = torch.arange(200, dtype=torch.uint8)


def load(path: Path | None, *, limit_bytes: int = 1 << 20, seq_length: int = 4) -> Corpus:
    return load_corpus(path, limit_bytes=limit_bytes, seq_length=seq_length)


def as_bytes(text: torch.Tensor) -> bytes:
    return bytes(text.tolist())


def write_files(root: Path, count: int) -> None:
    for index in range(count):
        (root / f"{index:03}.txt").write_bytes(f"<file {index:03}>".encode())


def test_the_standard_library_is_there_to_learn_from() -> None:
    first, second = load(None), load(None)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert len(first.train) + len(first.held_out) == 1 << 20
    assert first.truncated
    assert b"import" in as_bytes(first.train)
    assert len(first.held_out) > 1 << 14


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    corpus = load(tmp_path)
    assert as_bytes(corpus.held_out) == b"<file 009><file 019>"
    assert as_bytes(corpus.train) == b"".join(f"<file {i:03}>".encode() for i in range(25) if i not in {9, 19})
    assert (corpus.num_files, corpus.truncated) == (25, False)


def test_of_one_file_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    corpus = load(file)
    assert as_bytes(corpus.train) == bytes(range(90))
    assert as_bytes(corpus.held_out) == bytes(range(90, 100))


def test_hidden_and_binary_files_of_a_directory_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"b" * 60)
    (tmp_path / "a.txt").write_bytes(b"a" * 60)
    (tmp_path / "image").write_bytes(b"PNG\0" * 60)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"c" * 60)
    corpus = load(tmp_path)
    assert as_bytes(corpus.train) + as_bytes(corpus.held_out) == b"a" * 60 + b"b" * 60


def test_no_more_is_read_than_the_limit(tmp_path: Path) -> None:
    write_files(tmp_path, 25)
    corpus = load(tmp_path, limit_bytes=105)
    assert len(corpus.train) + len(corpus.held_out) == 105
    assert corpus.truncated
    exact = load(tmp_path, limit_bytes=250)
    assert not exact.truncated


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "too short"), (b"x" * 49, r"45 .*4 held out.* needs 5 of each")],
)
def test_text_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load(file)
    assert "--data" in str(caught.value)
    assert str(file) in str(caught.value)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too short: 0 bytes"):
        load(tmp_path)


def test_the_shortest_text_that_is_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(50)))
    corpus = load(file)
    [(tokens, targets)] = held_out_batches(corpus.held_out, batch_size=1, seq_length=4, num_batches=1)
    assert tokens.tolist() == [[45, 46, 47, 48]]
    assert targets.tolist() == [[46, 47, 48, 49]]


def test_a_limit_that_leaves_too_little_is_named(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(500))
    with pytest.raises(ConfigError, match="--data-limit 40 bytes"):
        load(file, limit_bytes=40)


def test_batches_are_those_of_the_seed() -> None:
    def first_batches(seed: int) -> list[list[list[int]]]:
        batches = training_batches(TEXT, batch_size=3, seq_length=8, seed=seed)
        return [tokens.tolist() for tokens, _ in itertools.islice(batches, 4)]

    torch.manual_seed(1)
    once = first_batches(7)
    torch.manual_seed(2)
    assert first_batches(7) == once
    assert first_batches(8) != once


@given(
    length=st.integers(6, 60), batch_size=st.integers(1, 5), num_batches=st.integers(1, 4), seed=st.integers(0, 1 << 40)
)
def test_targets_are_the_bytes_that_follow(length: int, batch_size: int, num_batches: int, seed: int) -> None:
    text = TEXT[:length]
    drawn = itertools.islice(training_batches(text, batch_size=batch_size, seq_length=5, seed=seed), num_batches)
    spread = held_out_batches(text, batch_size=batch_size, seq_length=5, num_batches=num_batches)
    assert len(spread) == num_batches
    for tokens, targets in [*drawn, *spread]:
        assert tokens.shape == targets.shape == (batch_size, 5)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens + 1, targets)
        assert torch.equal(tokens - tokens[:, :1], torch.arange(5).expand(batch_size, 5))
        assert targets.max() < length


def test_every_start_in_the_text_is_drawn() -> None:
    batches = training_batches(TEXT[:9], batch_size=50, seq_length=5, seed=0)
    tokens, targets = next(batches)
    assert sorted(set(tokens[:, 0].tolist())) == [0, 1, 2, 3]
    assert targets.max() == 8


def test_held_out_sequences_are_spread_over_the_text() -> None:
    batches = held_out_batches(TEXT, batch_size=2, seq_length=10, num_batches=2)
    assert [tokens[:, 0].tolist() for tokens, _ in batches] == [[0, 47], [95, 142]]


def missing(path: Path) -> Path:
    return path / "nowhere"


def below_a_file(path: Path) -> Path:
    (path / "file").touch()
    return path / "file" / "x"


def dangling(path: Path) -> Path:
    (path / "link").symlink_to(path / "gone")
    return path / "link"


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (missing, r"\S+/nowhere does not exist"),
        (below_a_file, r"\S+/file/x does not exist, because \S+/file is a file"),
        (dangling, r"\S+/link is a link to \S+/gone, which does not exist"),
        (lambda path: Path("/dev/full"), "/dev/full is neither a file nor a directory"),
        (lambda path: Path("/proc"), "/proc is the kernel's and holds no text"),
        (lambda path: path / ("x" * 300), r"\S+ cannot be looked at \(File name too long\)"),
    ],
)
def test_a_path_without_text_is_refused_in_one_precise_sentence(
    make: Callable[[Path], Path], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^--data: {problem}; give a text file or a directory of text files$"):
        load(make(tmp_path))
