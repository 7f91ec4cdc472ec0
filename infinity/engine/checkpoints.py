"""``Checkpoints``: what users call of commits: to make them, to go back to them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from infinity.engine.assembly import Assembly
from infinity.engine.persistence.durability import CommitInfo
from infinity.engine.persistence.exporting import export_tensors, values_of
from infinity.engine.persistence.joined import open_checkpoint
from infinity.errors import ConfigError, EngineStateError, NonFiniteError, NonFiniteWarning
from infinity.io.paths import user_path
from infinity.store.commits import Commit

T = TypeVar("T")
_END = object()


class Checkpoints(Assembly):
    """The part of ``Engine`` that makes commits and goes back to them."""

    _went_back: tuple[int, int] | None = None  # by itself: to which commit, and from which step

    def track(self, name: str, tracked: Any, *, is_data: bool | None = None) -> bool:
        """Have the state of an object go along with commits: a scheduler's, a loader's, anything's with ``state_dict``.

        With ``batches`` all states are taken at once. Without, that of what can be iterated over is taken when
        ``step()`` returns, that of all others at the next training forward; so a loop that calls ``scheduler.step()``
        after ``engine.step()`` resumes as if never stopped.

        Args:
            name: the same in every run.
            tracked: has ``state_dict()`` and ``load_state_dict()``.
            is_data: whether it is a position in data; ``None``: whether it can be iterated over.

        Returns:
            Whether it was given the state of a commit that was resumed, or of a checkpoint that was loaded. Then the
            optimizer gets the hyper-parameters again that it had there, which a scheduler sets when it is made.

        Raises:
            ModelError: it has none or is a class, or the name is no string, or another object's.
        """
        self._check_open()
        is_restored = self._capture.tracked.add(name, tracked, is_data=is_data)
        if is_restored:
            self._capture.restore_groups()
        return is_restored

    def batches(self, loader: Iterable[T]) -> Generator[T, None, None]:
        """The batches of a loader, for a training loop: ``for batch in engine.batches(loader)``.

        A commit that is due is taken when the loop asks for the next batch: all that follows a step is over then
        (schedulers, evaluation, averages), and nothing of the next has begun. So a resumed run draws the same random
        numbers, whoever draws them. The loader is not tracked by this: ``track`` what has a position.

        On several ranks it ends on all of them when the loader of one has ended: the others' last batch is left out, so
        that all take the same number of steps.

        Raises:
            RanksError: another rank has ended, or is about to do something else.
        """
        self._check_open()
        batches = iter(loader)
        try:
            while True:
                self._durability.at_boundary()
                batch = next(batches, _END)
                if not self._job.all_have(batch is not _END):
                    return
                yield cast("T", batch)
        finally:
            self._durability.at_boundary()  # the loop is left

    def untrack(self, name: str) -> None:
        """Have commits from now on keep no state by this name; one that is due included.

        Args:
            name: which ``track`` was given, or of which a resumed commit has a state that nobody asked for.

        Raises:
            ModelError: nothing is tracked by that name.
        """
        self._check_open()
        self._capture.tracked.remove(name)

    def commit(self) -> CommitInfo:
        """Make the state of now one to which ``rollback`` and a later run return, and wait until it is durable.

        Raises:
            ConfigError: the run keeps no commits (``Config.durability``).
            EngineStateError: gradients wait for a step, which no commit has.
            ModelError: a tracked object, the optimizer or a buffer holds what cannot be kept.
            StorageError: it could not be written; the commit before stands, and training may go on.
        """
        self._settle("commit")
        self._refuse_gradients("commit()")
        return self._durability.commit()

    def rollback(self, steps: int | None = None) -> CommitInfo:
        """Go back to a commit, bit for bit, random states and tracked objects included; also after a failure.

        Later commits and all gradients are gone.

        Args:
            steps: how many optimizer steps ago it was made; 0 for one of now, ``None`` for the newest.

        Raises:
            ConfigError: the run keeps no commits, or ``steps`` is no such number.
            NoCommitError: none is kept of that step, or none at all; the message says which are.
            StorageError: the system reported an error.
        """
        if steps is not None and (type(steps) is not int or steps < 0):
            raise ConfigError(f"rollback(steps): expected a number of steps, 0 or more, or None, got {steps!r}")
        self._refuse_inside("rollback")
        self._durability.join()
        return self._roll_back(self._durability.find(steps=steps))

    def save_checkpoint(self, path: str | os.PathLike[str], *, leave_gradients_out: bool = False) -> CommitInfo:
        """Write the whole state into a directory of its own: weights, optimizer states, random states, what is tracked.

        With several ranks all of them call this, with the same path on a file system that all see. The checkpoint is
        there whole or not at all, and is read by ``load_checkpoint`` under any budgets, by
        ``python -m infinity.checkpoint``, and by ``infinity.open_checkpoint``. With commits, one is made first.

        Args:
            path: of the directory; a checkpoint that is there is replaced once the new one is whole.
            leave_gradients_out: save also where gradients wait for a step. They go on waiting; who resumes begins that
                step anew. Without commits only.

        Raises:
            ConfigError: ``path`` is no path.
            DirectoryError: something else is at ``path``, or the directory that is to hold it is missing, or a state's.
            EngineStateError: gradients wait for a step, which no checkpoint has.
            ModelError: a tracked object, the optimizer or a buffer holds what cannot be kept.
            StorageError: it could not be written; what was at ``path`` stays.
        """
        self._settle("save_checkpoint")
        if not leave_gradients_out or self.config.durability != "off":
            self._refuse_gradients("save_checkpoint()")
        return self._durability.save(self._checkpoint_saver, path)

    def load_checkpoint(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> int:
        """Go on from a checkpoint, or from the last commit in the NVMe directories of a run that has ended.

        The model and the optimizer must be those of then; budgets, precision and all else may be others. All gradients
        are discarded, and what is tracked gets the states that it has there. With commits, one is made, and
        ``rollback`` goes no further back.

        Args:
            paths: a directory of ``save_checkpoint``; or a run's NVMe directories, all of them, of all its ranks.

        Returns:
            How many steps had been taken.

        Raises:
            DirectoryError: there is no such directory, or a live job owns it (``DirectoryInUseError``).
            ModelError: it is of another model or optimizer; nothing has been changed.
            NoCommitError: there is no state in it.
            StorageError: it could not be read, or is damaged.
        """
        self._refuse_inside("load_checkpoint")
        self._durability.join()
        together = self._durability.together
        with contextlib.ExitStack() as stack:
            stored = together.do("load_checkpoint", lambda: stack.enter_context(open_checkpoint(paths)))
            together.do("load_checkpoint", lambda: self._checkpoint_loader.load(stored, self._recover))
        for unit in self._units:
            unit.version += 1
        self._durability.num_steps = stored.step
        self._durability.begin_anew()
        return stored.step

    def export_safetensors(self, path: str | os.PathLike[str], *, max_file_bytes: int = 5 * 10**9) -> None:
        """Write the weights at full precision as safetensors files that others read, one tensor in memory at a time.

        Names are those of ``state_dict()``; tied weights are there once. Several files have an index beside them, as
        Hugging Face's libraries expect. With several ranks all call this; the first one writes.

        Args:
            path: a directory that does not exist, or is empty.
            max_file_bytes: how many bytes of tensors there are in a file.

        Raises:
            DirectoryError: ``path`` is no such directory.
            DiskFullError: there is no room.
            ModelError: the format has no word for a dtype.
            StorageError: something could not be read or written; nothing is left.
        """
        self._settle("export_safetensors")
        params = {slot.name: slot.param for part in self._plan.whole_parts for slot in part.slots}
        weights = {name: self._reader.deferred(param) for name, param in params.items()}
        self._export(
            "export_safetensors",
            path,
            weights | self._capture.persistent_buffers(),
            tied=self._capture.tied,
            max_file_bytes=max_file_bytes,
        )

    def export_tensors(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, torch.Tensor],
        *,
        max_file_bytes: int = 5 * 10**9,
        beside: Callable[[Path], None] = lambda directory: None,
    ) -> None:
        """Write any tensors as ``export_safetensors`` does: those of ``state_dict().deferred()``, or made from them.

        With several ranks all call this, with the same tensors; the first one writes.

        Args:
            path: a directory that does not exist, or is empty.
            tensors: by name, real and deferred ones; one in memory at a time.
            max_file_bytes: how many bytes of tensors there are in a file.
            beside: writes other files into the directory, before it gets its name.

        Raises:
            DirectoryError, DiskFullError, ModelError, StorageError: as for ``export_safetensors``.
        """
        self._settle("export_tensors")
        self._export("export_tensors", path, tensors, tied={}, max_file_bytes=max_file_bytes, beside=beside)

    def _export(self, what: str, path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], **how: Any) -> None:
        together, out = self._durability.together, user_path(path, what)

        def act() -> None:
            values = values_of(tensors)
            try:
                if together.ranks.rank == 0:
                    export_tensors(out, tensors, values, **how)
            finally:
                if together.ranks.num_ranks > 1:  # reading is something that all do, each one as often as the others
                    deque(values, maxlen=0)

        together.do(what, act)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that were taken, skipped ones and those before a resume included."""
        return self._durability.num_steps

    @property
    def last_commit(self) -> CommitInfo | None:
        """The newest commit whose making has ended; ``None``: there is none."""
        return self._durability.last

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of a backward wait for a step."""
        return bool(self._gradients.waiting())

    def _refuse_gradients(self, what: str) -> None:
        if self._gradients.waiting():
            raise EngineStateError(
                f"{what}: gradients of a backward wait for a step, and a commit has none; call step() or zero_grad() "
                "before"
            )

    def _refuse_inside(self, what: str) -> None:
        self._check_open()
        self._accumulation.refuse_inside(what)
        self._hooks.refuse_inside(what)
        self._gathered.check()

    def _recover(self) -> None:
        """Forget what is under way and what has failed: the state is about to be another."""
        self._hooks.recover()
        self._resources.loop.run(self._stream.reset())
        self._steps.reset()
        self._forget_gradients()
        for slot in (slot for unit in self._units for slot in unit.slots):
            slot.param.grad = None  # of a backward that was cut off

    def _roll_back(self, commit: Commit) -> CommitInfo:
        """Make a commit the state, whatever is under way or has failed."""
        self._durability.restore(commit, self._recover, self._steps.fail)
        for unit in self._units:
            unit.version += 1
        assert self._durability.last is not None
        return self._durability.last

    def _refuses_nonfinite(self) -> bool:
        """See ``Config.on_nonfinite``; whether the step is not to be."""
        what = self.config.on_nonfinite
        name = None if what == "continue" or self._scaling.inverses else self._clipper.find_nonfinite()
        if name is None:
            return False
        self._steps.judge(refuted=True)
        found = f"the gradient of parameter {name} is infinite or NaN in step {self.num_steps + 1}"
        if what == "error":
            raise NonFiniteError(
                f"{found}; nothing has been stepped: discard gradients with zero_grad(), or rollback()"
            )
        if self._durability.last is None:
            raise NonFiniteError(f"{found}, and there is no commit yet to go back to; nothing has been stepped")
        if self._went_back == (self._durability.last.number, self.num_steps):
            raise NonFiniteError(
                f"{found}, again after going back to commit {self._durability.last.number}: the same data and random "
                "numbers lead there; change something (data, learning rate, precision) before you go on"
            )
        self._went_back = self._durability.last.number, self.num_steps
        info = self._roll_back(self._durability.find(steps=None))
        warnings.warn(
            NonFiniteWarning(f"{found}: went back to commit {info.number}, of step {info.step}"), stacklevel=4
        )
        return True
