"""``KeptState``: the part of a training run that outlives it: commits, what was resumed, and how to go on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import infinity
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.train.history import History
from infinity.train.settings import TrainSettings
from infinity.train.trainer import Trainer


class KeptState:
    """Does nothing where no commits are kept.

    Args:
        trainer: an engine, or what trains without one.
        settings: the command's flags.
        config: the engine's configuration.
    """

    def __init__(self, trainer: Trainer, settings: TrainSettings, config: Config) -> None:
        is_kept = config.durability != "off" and isinstance(trainer, infinity.Engine)
        self._engine = trainer if is_kept and isinstance(trainer, infinity.Engine) else None
        self._settings = settings
        self._config = config
        self._resumed = None if self._engine is None else self._engine.last_commit

    @property
    def step(self) -> int:
        """How many steps were taken before this run."""
        return 0 if self._resumed is None else self._resumed.step

    def take_up(self, history: History) -> str | None:
        """Have the history go along with commits, and go on with that of the commit; what was resumed, in words.

        Raises:
            ConfigError: the commit is not one of this command's.
        """
        if self._engine is None:
            return None
        has_history = self._engine.track("history", history)
        if self._resumed is None:
            return None
        if not has_history or history.num_steps != self._resumed.step:
            raise ConfigError(
                f"--resume: commit {self._resumed.number} was not made by this command; go on in the program that made "
                "it, or give another --nvme"
            )
        return f"resumed commit {self._resumed.number}, of step {self._resumed.step}"

    def keep(self, history: History) -> str | None:
        """Make a last commit if the last step has none, and say where it is and how to go on.

        A run that has diverged makes none: it would take the place of one that can still be used.

        Raises:
            StorageError: it could not be written; the one before stands.
        """
        engine = self._engine
        if engine is None:
            return None
        if history.diverged_at is None:
            engine.synchronize()
            if engine.last_commit is None or engine.last_commit.step != engine.num_steps:
                engine.commit()
        last = engine.last_commit
        if last is None:
            return "no commit was made"
        places = ",".join(map(str, self._config.nvme))
        more = "" if last.step < self._settings.num_steps else " and a larger --steps"
        return f"state after step {last.step}: commit {last.number} in {places}; go on from it with --resume{more}"

    def as_document(self) -> dict[str, Any] | None:
        """The last commit, for the run's document."""
        last = None if self._engine is None else self._engine.last_commit
        return None if last is None else {**asdict(last), "resumed_step": self.step}
