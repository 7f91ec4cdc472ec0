"""What an engine does about commits: the contract, and ``Scratch``, which makes none (``durable.py`` does)."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinity.engine.persistence.checkpoint import CheckpointSaver
from infinity.engine.persistence.saving_together import check_together, save_together
from infinity.engine.persistence.stored_state import StoredState
from infinity.engine.persistence.together import Together
from infinity.errors import ConfigError
from infinity.store.commits import Commit


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """What a commit was.

    Attributes:
        number: which.
        step: how many optimizer steps were taken before it.
        num_bytes: what its shards take.
        written_bytes: what had to be written for it: shards that were newer in memory, its record and its tensors.
        seconds: from when it was due until it was durable; training went on meanwhile.
        wait_seconds: how long training waited for it.
    """

    number: int
    step: int
    num_bytes: int
    written_bytes: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0


class Durability(ABC):
    """What an engine does about commits.

    Args:
        together: what all ranks do at once; ``None``: there is one.

    Attributes:
        num_steps: how many optimizer steps were taken, skipped ones included, those before a resume too.
        last: the newest commit.
        together: what all ranks do at once.
    """

    num_steps: int = 0
    last: CommitInfo | None = None

    def __init__(self, together: Together | None = None) -> None:
        self.together = together or Together()

    @abstractmethod
    def resume(self, leave: Callable[[], None]) -> bool:
        """Go on with the shards of the commit that was found, before anything is in the store.

        Args:
            leave: takes the values that the model has out of it.

        Returns:
            Whether there are such; not if they are stored otherwise than this engine's.
        """

    @abstractmethod
    def begin(self, load: Callable[[StoredState], None]) -> None:
        """Training may begin, with all that the commit has that was found.

        Args:
            load: gives the engine the state of a commit whose shards cannot serve as they are.
        """

    @abstractmethod
    def begin_anew(self) -> None:
        """The state is that of another run, or time: there is no way back from here."""

    @abstractmethod
    def at_boundary(self) -> None:
        """A step and whatever follows it are over, and the next batch has not been fetched."""

    @abstractmethod
    def end_step(self) -> None:
        """A step was taken, and has been counted."""

    @abstractmethod
    def proceed(self) -> None:
        """The engine is used again: take what must be as it was before."""

    @abstractmethod
    def join(self) -> None:
        """Wait for a commit that is under way; ``check`` tells how it ended."""

    @abstractmethod
    def check(self) -> None:
        """Raise what a commit has failed with, once."""

    @abstractmethod
    def commit(self) -> CommitInfo:
        """Make one now, and wait for it. Nothing is under way."""

    @abstractmethod
    def save(self, saver: CheckpointSaver, path: str | os.PathLike[str]) -> CommitInfo:
        """Write the state into a directory of its own. Nothing is under way; a path is refused before all else."""

    @abstractmethod
    def find(self, *, steps: int | None) -> Commit:
        """The commit from which training has taken so many steps; ``None``: the newest."""

    @abstractmethod
    def restore(self, commit: Commit, recover: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Go back to a commit.

        Args:
            commit: which.
            recover: called before anything is changed: nothing is under way then, and nobody uses any shard.
            fail: told what has failed half-way, when the state is of neither time.
        """


class Scratch(Durability):
    """No commits: what is in the tiers ends with the engine."""

    def resume(self, leave: Callable[[], None]) -> bool:
        """There is none."""
        return False

    def begin(self, load: Callable[[StoredState], None]) -> None:
        """Random states are as they are."""

    def begin_anew(self) -> None:
        """Nothing follows from it."""

    def at_boundary(self) -> None:
        """Nothing is under way."""

    def end_step(self) -> None:
        """Nothing follows from it."""

    def proceed(self) -> None:
        """Nothing is under way."""

    def join(self) -> None:
        """Nothing is under way."""

    def check(self) -> None:
        """Nothing has failed."""

    def commit(self) -> CommitInfo:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "commit(): this run keeps no commits; set durability='checkpoint' in Config, or a number of steps"
        )

    def save(self, saver: CheckpointSaver, path: str | os.PathLike[str]) -> CommitInfo:
        """Copy all shards."""
        place = check_together(self.together, path)
        begun, number = time.perf_counter(), self.num_steps
        _, told = self.together.tell("save_checkpoint", lambda: secrets.token_hex(16), lambda name: name)

        def write(place: Path, later: Path | None) -> int:
            return saver.save(place, step=self.num_steps, state=told[0], number=number, later=later)

        num_bytes = save_together(self.together, place, write)
        seconds = time.perf_counter() - begun
        return CommitInfo(number, self.num_steps, num_bytes, num_bytes, seconds, seconds)

    def find(self, *, steps: int | None) -> Commit:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "rollback(): this run keeps no commits; set durability='checkpoint' in Config, or a number of steps"
        )

    def restore(self, commit: Commit, recover: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """There is none."""
        raise AssertionError("a run without commits has none to go back to")
