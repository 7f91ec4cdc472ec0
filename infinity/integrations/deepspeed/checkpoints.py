"""``Checkpoints``: DeepSpeed's calls for checkpoints. ``DIR/TAG`` is one, ``DIR/latest`` names the last.

What stands in ``DIR/TAG`` is what ``infinity.Engine.save_checkpoint`` writes: it is read by ``python -m
infinity.checkpoint``, under any budgets, precision and number of ranks, and without unpickling anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from infinity.deepspeed_json.schedules import Schedule
from infinity.engine.engine import Engine
from infinity.engine.meeting import place, wait_for_all
from infinity.engine.persistence.joined import open_checkpoint
from infinity.errors import ModelError, NoCommitError, system_errors
from infinity.integrations.deepspeed.log import log_dist, not_needed
from infinity.integrations.deepspeed.progress import Progress
from infinity.integrations.deepspeed.weights import write_weights
from infinity.io.paths import user_path
from infinity.store.held import sync_directory

LATEST = "latest"
TRACKED = "deepspeed"
"""What the engine's commits call ``Progress``."""


class Checkpoints(nn.Module):
    """The part of ``DeepSpeedEngine`` that writes and reads checkpoints.

    Attributes:
        infinity: the engine.
        progress: what is counted.
        lr_scheduler: the one that ``step()`` steps, or ``None``.
    """

    infinity: Engine
    progress: Progress
    lr_scheduler: Any

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole state into ``save_dir/tag``; all ranks call it alike.

        Args:
            save_dir: is made where it is missing; all ranks see it.
            tag: ``None`` for ``global_step<N>``; a checkpoint of that name is replaced once the new one is whole.
            client_state: goes along: numbers, strings, tensors, and lists and dictionaries of them.
            save_latest: whether ``save_dir/latest`` is to name it.
            exclude_frozen_parameters: not needed: it would only be smaller.

        Raises:
            DirectoryError: something else is at ``save_dir/tag``.
            EngineStateError: gradients wait for a step: save after ``step()`` at a boundary.
            ModelError: ``client_state`` holds what cannot be kept; the message says where.
            StorageError: it could not be written; what was there stays.
        """
        if exclude_frozen_parameters:
            not_needed("save_checkpoint(exclude_frozen_parameters=True)", "a checkpoint has all that resuming takes")
        directory = user_path(save_dir, "save_checkpoint")
        name = _tag(f"global_step{self.progress.global_steps}" if tag is None else tag)
        was_there = directory.exists()
        with system_errors("making a directory", directory):
            directory.mkdir(parents=True, exist_ok=True)
        self.progress.client_state = dict(client_state or {})
        try:
            self.infinity.save_checkpoint(directory / name)
        except BaseException:
            if not was_there:
                with contextlib.suppress(OSError):  # another rank's, or no longer empty
                    directory.rmdir()
            raise
        finally:
            self.progress.client_state = {}
        if save_latest and place().rank == 0:
            _write_latest(directory, name)
        wait_for_all()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint; all ranks call it alike, and there may be another number of them.

        With all of it, random states come back too, so the run goes on as if never stopped.

        Args:
            load_dir: what ``save_checkpoint`` was given.
            tag: which; ``None`` for the one that ``latest`` names.
            load_module_strict: refuse weights with other names than the model's.
            load_optimizer_states: with ``False``, only weights, counters and the scheduler are loaded.
            load_lr_scheduler_states: whether the scheduler gets its state.
            load_module_only: load weights and nothing else.
            custom_load_fn: refused: give ``engine.infinity.load_state_dict`` a state of your own.

        Returns:
            The path, and ``client_state``; two times ``None`` where ``load_dir`` has no ``latest``.

        Raises:
            DirectoryError: there is no such checkpoint.
            ModelError: it is of another model or optimizer, or one of DeepSpeed's own.
            StorageError: it could not be read, or is damaged.
        """
        if custom_load_fn is not None:
            raise ModelError("load_checkpoint(custom_load_fn=...): give engine.infinity.load_state_dict() your state")
        directory = user_path(load_dir, "load_checkpoint")
        if tag is None and not (directory / LATEST).is_file():
            missing = f"load_checkpoint: there is no file {directory / LATEST}, so nothing was loaded; or give a tag"
            log_dist(missing, level=logging.WARNING)
            return None, None
        path = checkpoint_path(directory, tag)
        self.progress.takes_scheduler = load_lr_scheduler_states
        try:
            if load_optimizer_states and not load_module_only:
                self._check_names(path, strict=load_module_strict)
                self.infinity.load_checkpoint(path)
                client_state = self.progress.client_state
            else:
                client_state = self._load_some(path, strict=load_module_strict, only_module=load_module_only)
        finally:
            self.progress.takes_scheduler = True
            self.progress.client_state = {}
        return str(path), client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in the precision that computes, in one file; all ranks call it alike.

        Args:
            save_dir: is made where it is missing.
            save_filename: a name that ends in ``.bin`` or ``.pt`` is written by ``torch.save``, which holds all weights
                in memory; else it is a safetensors file, written tensor by tensor.
            exclude_frozen_parameters: leave out parameters that require no gradient.

        Raises:
            StorageError: it could not be written; what was there stays.
        """
        directory = user_path(save_dir, "save_16bit_model")
        with system_errors("making a directory", directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_weights(self.infinity, directory / save_filename, without_frozen=exclude_frozen_parameters)
        wait_for_all()
        return True

    save_fp16_model = save_16bit_model

    def _check_names(self, path: Path, *, strict: bool) -> None:
        if strict:
            return
        with open_checkpoint(path) as stored:
            other = set(stored.weights) ^ set(self.infinity.state_dict())
        if other:
            raise ModelError(
                f"load_checkpoint(load_module_strict=False): {path} has other weights than the model ({min(other)}), "
                "so its optimizer states are not the model's; give load_optimizer_states=False"
            )

    def _load_some(self, path: Path, *, strict: bool, only_module: bool) -> dict[str, Any]:
        """Weights, and where it is asked for what is counted; returns ``client_state``."""
        with open_checkpoint(path) as stored:
            tracked: dict[str, Any] = stored.of_rank(place().rank).tracked.get(TRACKED, {})
            self.infinity.load_state_dict(stored.weights, strict=strict)
        if tracked and not only_module:
            self.progress.load_state_dict(tracked)
            self._follow_scheduler()
        return dict(tracked.get("client_state", {}))

    def _follow_scheduler(self) -> None:
        """Have groups the rates that the scheduler has set; else the first step would have the ones before."""
        if self.progress.takes_scheduler and self.lr_scheduler is not None:
            scheduler = self.lr_scheduler
            rates = scheduler.get_lr() if isinstance(scheduler, Schedule) else scheduler.get_last_lr()
            for group, rate in zip(self.infinity.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def checkpoint_path(directory: str | os.PathLike[str], tag: str | int | None = None) -> Path:
    """Where a checkpoint is.

    Args:
        directory: what ``save_checkpoint`` was given.
        tag: which; ``None`` for the one that ``latest`` names.

    Raises:
        ModelError: it is one of DeepSpeed's own.
        NoCommitError: there is none.
    """
    directory = user_path(directory, "load_checkpoint")
    if tag is None:
        try:
            tag = (directory / LATEST).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise NoCommitError(
                "there is no file that names the latest checkpoint; give a tag", path=directory
            ) from error
    path = directory / _tag(tag)
    if not path.is_dir():
        raise NoCommitError(f"there is no checkpoint of tag {tag!r}", path=path)
    if any(path.glob("*_model_states.pt")):
        raise ModelError(
            f"load_checkpoint(): {path} is a checkpoint of DeepSpeed's own, whose files are pickles: turn it into "
            "safetensors files with the zero_to_fp32.py beside it (--safe_serialization), and load the weights with "
            "engine.infinity.load_state_dict(infinity.open_weights(directory))"
        )
    return path


def _tag(tag: str | int) -> str:
    name = str(tag)
    if not name or name in {".", "..", LATEST} or "/" in name or "\0" in name:
        raise ModelError(f"tag: expected the name of a directory, got {tag!r}")
    return name


def _write_latest(directory: Path, tag: str) -> None:
    """Have ``latest`` name a checkpoint, whatever ends the process: the one before or this one."""
    new = directory / f".{LATEST}.{secrets.token_hex(8)}"
    with system_errors("writing the name of the latest checkpoint", directory / LATEST):
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(tag)
                file.flush()
                os.fsync(file.fileno())
            new.replace(directory / LATEST)
            sync_directory(directory)
        finally:
            new.unlink(missing_ok=True)
