"""Damaged and forged states, and what reading them must come to: the values that were written, or a typed error.

What chance does to files (bits that flip, ends that are missing, old bytes in the place of new ones) must never give
another value. What somebody forges, checksums included, may be any state, but must be read without another exception,
and within the memory that the state on disk has.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from infinity.engine.persistence.pieces import Pieces
from infinity.engine.persistence.stored_state import StoredState
from infinity.errors import InfinityError
from infinity.store.manifest import decode, encode, long_checksum, manifest_name, tensors_name
from infinity.store.stored import StoredCommit
from states_on_disk import Sketch, StateWriter, flat_bits

SKETCHES = [
    Sketch(0, 0, torch.bfloat16, torch.float32, "planes", "full", {"embedding.weight": (7, 24)}),
    Sketch(1, 0, torch.bfloat16, torch.float32, "planes", "int8", {"up": (96, 70), "one": ()}, wide=True),
    Sketch(1, 1, torch.float16, torch.float32, "master", "bf16", {"conv": (3, 5)}),
    Sketch(2, 0, torch.float32, torch.float32, "whole", "full", {"norm": (5,)}),
]
GROUPS = [{"lr": 0.1, "betas": (0.9, float("inf")), "params": ["embedding.weight", "up", "one", "conv", "norm"]}]

Values = dict[str, Any]


class FoundError(AssertionError):
    """Reading came to something else than values or a typed error."""


class StateFuzzer:
    """Makes inputs and reads them.

    Args:
        directory: to work in; empty.
        seed: of everything.

    Attributes:
        outcomes: how often each kind of input came to each end.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._random = random.Random(seed)
        self._writer = StateWriter([directory / "a", directory / "b"], SKETCHES, GROUPS, seed=seed)
        self._writer.write(1)
        self._files = [d / n for d, n in zip(self._writer.directories, self._writer.names, strict=True)]
        old = [path.read_bytes() for path in self._files]
        self._manifest_path = self._writer.directories[0] / manifest_name(2)
        self._tensors_path = self._writer.directories[0] / tensors_name(2)
        self._writer.write(2)
        self._data = [path.read_bytes() for path in self._files]
        self._old_data = [content.ljust(len(new), b"\0") for content, new in zip(old, self._data, strict=True)]
        self._manifest = self._manifest_path.read_bytes()
        self._tensors = self._tensors_path.read_bytes()
        self._body = json.loads(self._manifest)["body"]
        self._expected = self._read()
        self._kinds: dict[str, Callable[[], None]] = {
            "manifest, damaged": self._damaged_manifest,
            "manifest, forged": self._forged_manifest,
            "tensors, damaged": self._damaged_tensors,
            "tensors, forged": self._forged_tensors,
            "data, damaged": self._damaged_data,
            "data, another": self._other_data,
        }

    @property
    def kinds(self) -> list[str]:
        """What inputs there are."""
        return list(self._kinds)

    def run(self, num_inputs: int, kind: str) -> None:
        """Make and read so many inputs.

        Raises:
            FoundError: one came to something else than values or a typed error; the message is enough to repeat it.
        """
        for number in range(num_inputs):
            state = self._random.getstate()
            try:
                self._kinds[kind]()
            except Exception as error:
                raise FoundError(
                    f"{kind}, input {number}: {type(error).__name__}: {error} (random state {hash(state)})"
                ) from error

    # Inputs

    def _damaged_manifest(self) -> None:
        content = self._damage(self._manifest)
        try:
            decoded = decode(content, self._manifest_path)
        except InfinityError as error:
            self._note("manifest, damaged", error)
            return
        assert encode(decoded) == self._manifest, "a damaged manifest is another one"
        self._note("manifest, damaged", None)

    def _forged_manifest(self) -> None:
        content = self._forged_body()
        try:
            manifest = decode(content, self._manifest_path)
            with StoredCommit(manifest, self._manifest_path, self._writer.directories) as commit:
                self._take(commit)
        except InfinityError as error:
            self._note("manifest, forged", error)
            return
        self._note("manifest, forged", None)

    def _forged_body(self) -> bytes:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100 * limit)  # to write what no reader may be asked to follow
        try:
            body = copy.deepcopy(self._body)
            for _ in range(self._random.choice([1, 1, 1, 2, 5])):
                body = self._forge(body)
            return _sealed(body)
        finally:
            sys.setrecursionlimit(limit)

    def _damaged_tensors(self) -> None:
        self._try_file("tensors, damaged", self._tensors_path, self._tensors, self._damage(self._tensors))

    def _forged_tensors(self) -> None:
        tensors = self._damage(self._tensors)
        body = copy.deepcopy(self._body)
        body["tensors"] = {"num_bytes": len(tensors), "checksum": long_checksum(tensors)}
        self._tensors_path.write_bytes(tensors)
        try:
            manifest = decode(_sealed(body), self._manifest_path)
            with StoredCommit(manifest, self._manifest_path, self._writer.directories) as commit:
                self._take(commit)
            self._note("tensors, forged", None)
        except InfinityError as error:
            self._note("tensors, forged", error)
        finally:
            self._tensors_path.write_bytes(self._tensors)

    def _damaged_data(self) -> None:
        index = self._random.randrange(len(self._files))
        content = bytearray(self._data[index])
        for _ in range(self._random.choice([1, 1, 2, 8])):
            content[self._random.randrange(len(content))] ^= 1 << self._random.randrange(8)
        if self._random.random() < 0.2:
            del content[self._random.randrange(len(content)) :]
        self._try_file("data, damaged", self._files[index], self._data[index], bytes(content))

    def _other_data(self) -> None:
        """Bytes of another time or place: an old file under a new manifest, extents that have changed places."""
        index = self._random.randrange(len(self._files))
        here = self._data[index]
        content = bytearray(here)
        pages = len(here) // 4096
        way = self._random.randrange(4)
        if way == 0:
            content = bytearray(self._old_data[index])
        elif way == 1:
            content = bytearray(self._data[1 - index])
        else:
            first, second = (4096 * self._random.randrange(pages) for _ in range(2))
            count = 4096 * self._random.randint(1, 3)
            source = here if way == 2 else self._old_data[index]
            content[first : first + count] = source[second : second + count]
        self._try_file("data, another", self._files[index], here, bytes(content))

    # Reading

    def _try_file(self, kind: str, path: Path, whole: bytes, content: bytes) -> None:
        """Put other bytes into a file: what is read must be what was written, or an error."""
        path.write_bytes(content)
        try:
            assert self._read() == self._expected, "another value was read"
            self._note(kind, None)
        except InfinityError as error:
            self._note(kind, error)
        finally:
            path.write_bytes(whole)

    def _read(self) -> Values:
        with StoredCommit.open(self._writer.directories, 2) as commit:
            return self._take(commit)

    def _take(self, commit: StoredCommit) -> Values:
        """All that there is, in comparable form; one way of reading in turn."""
        state = StoredState(commit)
        found: Values = {"step": state.step, "random": _comparable(state.random), "tracked": _comparable(state.tracked)}
        found["scaling"], found["groups"] = _comparable(state.scaling), None
        for name, value in state.weights.items():
            found[f"weight {name}"] = _comparable(value)
        for name, value in state.compute_weights.items():
            found[f"computing {name}"] = _comparable(value)
        optimizer = state.optimizer_state_dict
        found["groups"] = _comparable(optimizer["param_groups"])
        for index, each in optimizer["state"].items():
            each.outline()
            found[f"state {index}"] = _comparable(dict(each))
        pieces = Pieces(state, block_bytes=8192)
        for part in state.parts:
            streams = [pieces.weights(part), *(pieces.states(part, name) for name in state.layouts[part.index].states)]
            for number, stream in enumerate(streams):
                for position, start, values in stream:
                    found[f"piece {part.index} {number} {position} {start}"] = flat_bits(values)
        return found

    def _note(self, kind: str, error: InfinityError | None) -> None:
        self.outcomes[kind, "values" if error is None else type(error).__name__] += 1

    # Changes

    def _damage(self, content: bytes) -> bytes:
        """What chance, or a careless hand, does to a file."""
        changed = bytearray(content)
        for _ in range(self._random.choice([1, 1, 2, 6])):
            size = len(changed)
            start = self._random.randrange(size + 1)
            stop = min(start + self._random.choice([1, 2, 8, 100, 4096]), size)
            way = self._random.randrange(7)
            if way <= 1 and start < size:
                changed[start] ^= 1 << self._random.randrange(8)
            elif way == 2:
                del changed[start:]
            elif way == 3:
                del changed[start:stop]
            elif way == 4:
                changed[start:start] = self._random.randbytes(self._random.choice([1, 3, 50]))
            elif way == 5:
                other = self._random.randrange(size + 1)
                changed[start:stop] = changed[other : other + stop - start]
            elif way == 6:
                changed[start:start] = self._random.choice(
                    [b"[" * 5000, b'{"a":' * 3000, b"9" * 5000, b"1e999", b"NaN", b"\xff\xfe", b"\0", b'"\\ud800"']
                )
            if not changed:
                break
        return bytes(changed)

    def _forge(self, body: Any) -> Any:
        """Another document, somewhere."""
        parent, key = self._somewhere(body)
        way = self._random.randrange(6)
        if way == 0 and isinstance(parent, dict):
            del parent[key]
        elif way == 1 and isinstance(parent, dict):
            parent[self._random.choice(["", "$tensor", "$dict", "extra", "exp_avg"])] = self._value()
        elif way == 2:
            other = self._random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            parent[key], parent[other] = parent[other], parent[key]
        elif way == 3:
            other_parent, other = self._somewhere(body)
            parent[key] = copy.deepcopy(other_parent[other])
        elif way == 4 and isinstance(parent[key], int) and not isinstance(parent[key], bool):
            parent[key] += self._random.choice([-1, 1, 4096, -4096, 1 << 40, 1 << 61, -parent[key]])
        else:
            parent[key] = self._value()
        return body

    def _somewhere(self, document: Any) -> tuple[Any, Any]:
        """A place in a document: a container that is not empty, and a key or an index."""
        parent: Any = {"body": document}
        key: Any = "body"
        if self._random.random() < 0.6 and isinstance(document, dict) and isinstance(document.get("engine"), dict):
            parent, key = document, "engine"
        while True:
            inside = parent[key]
            if (
                not isinstance(inside, (dict, list))
                or not inside
                or (self._random.random() < 0.25 and inside is not document)
            ):
                return parent, key
            parent = inside
            key = self._random.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))

    def _value(self) -> Any:
        deep: Any = 1
        for _ in range(self._random.choice([50, 400, 700])):
            deep = [deep] if self._random.random() < 0.5 else {"$tuple": [deep]}
        return self._random.choice(
            [
                None, True, False, 0, 1, -1, 7, 4096, 1 << 31, (1 << 62) - 1, 1 << 64, 10**400, 0.5, -0.0, 1e300, "",
                "float32", "Tensor", "int4", "up", "x" * 2000, "../a", "\0", "\ud800", [], {}, [1], [[]], {"a": 1},
                {"$tensor": "t0"}, {"$tensor": "none"}, {"$tensor": []}, {"$array": "t1"}, {"$tuple": 3},
                {"$set": [[1]]}, {"$dict": [[1]]}, {"$dict": [[[1], 2]]}, {"$bytes": "?"}, {"$float": "x"},
                {"$float": 10**400}, {"$float": "1e400"}, {"$complex": [1]}, {"$complex": ["a", {}]},
                {"$dtype": "float32"}, {"$dtype": "load"}, {"$dtype": 3}, {"$other": 1}, deep,
            ]
        )  # fmt: skip


def _sealed(body: Any) -> bytes:
    """A manifest of this body whose checksum is right."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")
    head = {"format": "infinity-commit", "version": 1, "checksum": long_checksum(canonical)}
    return b'%b, "body": %b}\n' % (json.dumps(head)[:-1].encode(), canonical)


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), flat_bits(value)
    if isinstance(value, dict):
        return {str(key): _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_comparable(item) for item in value)]
    return repr(value)
