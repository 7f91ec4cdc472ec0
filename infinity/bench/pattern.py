"""``Pattern``: bytes that say where they belong, so that a block lost, stale or in the wrong place is seen.

Each 8-byte word of a file is a multiple of its own number plus a number of the file and of the generation: no two words
of a file are alike, none is the same in two files at one place or in two generations, and neither compression nor
deduplication finds anything in them. It is generated and compared at memory speed, a cache-sized piece at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from infinity.errors import MismatchError

_WORD_BYTES = 8
_PIECE_WORDS = 1 << 16
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 is one to one
_RAMP = np.arange(_PIECE_WORDS, dtype=np.uint64) * np.uint64(_FACTOR)
_MASK = (1 << 64) - 1

Bytes = npt.NDArray[np.uint8]


class Pattern:
    """The contents of all files in one generation.

    Args:
        generation: which one; different generations differ in every word.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation

    def fill(self, target: Bytes, file: int, offset: int) -> None:
        """Write what belongs at an offset of a file.

        Args:
            target: ``uint8``, shape ``(n,)``, a multiple of 8 bytes.
            file: number of the file.
            offset: byte offset, a multiple of 8.
        """
        words = target.view(np.uint64)
        for start in range(0, len(words), _PIECE_WORDS):
            piece = words[start : start + _PIECE_WORDS]
            np.add(_RAMP[: len(piece)], self._first(file, offset + start * _WORD_BYTES), out=piece)

    def check(self, got: Bytes, file: int, offset: int, *, path: Path, source: str) -> None:
        """Compare every byte with what belongs at an offset of a file.

        Args:
            got: ``uint8``, shape ``(n,)``, a multiple of 8 bytes.
            file: number of the file.
            offset: byte offset, a multiple of 8.
            path: the file, for the error.
            source: where the bytes came from, in words, for the error.

        Raises:
            MismatchError: some byte differs; it names the first.
        """
        words = got.view(np.uint64)
        expected = np.empty(_PIECE_WORDS, np.uint64)
        for start in range(0, len(words), _PIECE_WORDS):
            piece = words[start : start + _PIECE_WORDS]
            right = expected[: len(piece)]
            np.add(_RAMP[: len(piece)], self._first(file, offset + start * _WORD_BYTES), out=right)
            if not np.array_equal(piece, right):
                wrong = np.flatnonzero(piece.view(np.uint8) != right.view(np.uint8))
                first = int(wrong[0])
                raise MismatchError(
                    f"wrong bytes came back from {source}: the first is {piece.view(np.uint8)[first]:#04x} where "
                    f"{right.view(np.uint8)[first]:#04x} was written, {len(wrong)} of the {piece.nbytes} bytes around "
                    "it are wrong; do not keep state there",
                    path=path,
                    offset=offset + start * _WORD_BYTES + first,
                )

    def _first(self, file: int, offset: int) -> np.uint64:
        salt = xxhash.xxh3_64_intdigest(f"{file} {self._generation}".encode())
        first: np.uint64 = np.uint64((offset // _WORD_BYTES * _FACTOR + salt) & _MASK)
        return first
