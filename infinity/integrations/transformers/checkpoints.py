"""Directories ``checkpoint-<step>`` of a trainer: which are whole, which may go, what is read back from them.

In each there are

- ``config.json``, ``model.safetensors``, …: the model, as ``from_pretrained()`` loads it;
- ``infinity/``: the engine's checkpoint: weights, optimizer states, loss scale;
- ``scheduler.pt``, ``rng_state.pth``: as any ``Trainer`` has them;
- ``trainer_state.json``: written last; with it, the checkpoint is whole.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from infinity.engine.engine import Engine
from infinity.engine.persistence.importing import open_weights
from infinity.engine.persistence.joined import open_checkpoint
from infinity.engine.randomness import Generators
from infinity.errors import DirectoryError, ModelError, NoCommitError
from infinity.integrations.transformers.loading import can_load_deferred, converted_weights
from infinity.integrations.transformers.sources import has_weights

STATE_NAME = "infinity"
TRAINER_STATE_NAME = "trainer_state.json"
OPTIMIZER_NAME = "optimizer.pt"
_NAME = re.compile(r"checkpoint-(\d+)")

_logger = logging.get_logger(__name__)


def step_of(directory: Path) -> int | None:
    """After how many steps a trainer has written it; ``None``: none has, or not to the end."""
    found = _NAME.fullmatch(directory.name)
    try:
        state = json.loads((directory / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return int(found[1]) if found is not None and isinstance(state, dict) and "global_step" in state else None


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """Those in a directory, in the order of their steps."""
    steps = {each: step_of(each) for each in output_dir.iterdir() if each.is_dir()} if output_dir.is_dir() else {}
    found = [(step, each) for each, step in steps.items() if step is not None]
    return [each for _, each in sorted(found)]


def newest_checkpoint(output_dir: Path) -> Path:
    """The one to go on from; one that was not written to the end is passed over, and named in the log.

    Raises:
        NoCommitError: there is none.
    """
    found = whole_checkpoints(output_dir)
    last = step_of(found[-1]) if found else -1
    for each in output_dir.glob("checkpoint-*"):
        name = _NAME.fullmatch(each.name)
        if name is not None and step_of(each) is None and int(name[1]) > (last or 0):
            _logger.warning(f"{each} was not written to the end and is passed over")
    if not found:
        raise NoCommitError(
            "resume_from_checkpoint=True: there is no whole checkpoint-<step> here; leave it out to begin",
            path=output_dir,
        )
    return found[-1]


def rotate(output_dir: Path, keep: int | None, best: str | None, *, newest_stays: bool = True) -> None:
    """Remove the oldest whole checkpoints of a trainer, those that were written first, and nothing else.

    Args:
        output_dir: where they are.
        keep: how many stay; ``None``: all.
        best: one that stays.
        newest_stays: the newest does as well.
    """
    if keep is None or keep <= 0:
        return
    # By age, as a run before may have left some of later steps.
    found = sorted(whole_checkpoints(output_dir), key=lambda each: (each / TRAINER_STATE_NAME).stat().st_mtime_ns)
    protected = {Path(best).resolve()} if best is not None else set()
    if newest_stays and found:
        protected.add(found[-1].resolve())
    num_over = len(found) - max(keep, len(protected))
    for each in [each for each in found if each.resolve() not in protected][: max(num_over, 0)]:
        _logger.info(f"Deleting older checkpoint [{each}] due to args.save_total_limit")
        shutil.rmtree(each)


def check_resumable(checkpoint: Path) -> None:
    """Refuse what there is no way to go on from.

    Raises:
        DirectoryError: it is no checkpoint of a trainer, or has no state of an optimizer.
    """
    if not checkpoint.is_dir():
        raise DirectoryError("resume_from_checkpoint: there is no such directory", path=checkpoint)
    if not (checkpoint / STATE_NAME).is_dir() and not (checkpoint / OPTIMIZER_NAME).is_file():
        raise DirectoryError(
            f"resume_from_checkpoint: there is neither {STATE_NAME}/ nor {OPTIMIZER_NAME} in it, so there is no state "
            "of an optimizer to go on with (save_only_model=True saves none); begin anew with its weights",
            path=checkpoint,
        )


def load_state(engine: Engine, checkpoint: Path) -> None:
    """Give the engine the state of a checkpoint: of this trainer, or of a plain one. Random states stay.

    Raises:
        InfinityError: see ``Engine.load_checkpoint``, and ``load_weights``.
    """
    with _random_states_kept(engine.config.torch_device()):
        if (checkpoint / STATE_NAME).is_dir():
            engine.load_checkpoint(checkpoint / STATE_NAME)
        else:
            load_weights(engine, checkpoint)
            engine.optimizer.load_state_dict(
                torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
            )


def load_weights(engine: Engine, checkpoint: Path) -> None:
    """Give the model the weights of a checkpoint, one at a time; all else stays.

    Raises:
        ModelError: they are of another model.
        StorageError: they could not be read.
    """
    if (checkpoint / STATE_NAME).is_dir():
        with open_checkpoint(checkpoint / STATE_NAME) as state:
            engine.load_state_dict(_with_aliases(engine.module, state.weights))
    elif isinstance(engine.module, PreTrainedModel) and can_load_deferred() and has_weights(checkpoint):
        engine.load_state_dict(converted_weights(engine.module, checkpoint))
    else:
        engine.load_state_dict(_with_aliases(engine.module, open_weights(checkpoint)))


def _with_aliases(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Weights under all names that the model has for them: files have tied ones once.

    Raises:
        ModelError: there is none under any of a parameter's names.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(param, []).append(name)
    sources = {name: name for name in weights}
    for names in names_of.values():
        there = next((name for name in names if name in weights), None)
        if there is None:
            raise ModelError(f"parameter {names[0]}: the checkpoint has no weight by this name")
        sources |= {name: there for name in names if name not in weights}
    return _Renamed(weights, sources)


class _Renamed(Mapping[str, torch.Tensor]):
    """Some under further names; read when they are asked for."""

    def __init__(self, weights: Mapping[str, torch.Tensor], sources: Mapping[str, str]) -> None:
        self._weights = weights
        self._sources = sources

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[self._sources[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


@contextlib.contextmanager
def _random_states_kept(device: torch.device) -> Iterator[None]:
    """A context that leaves random states as they were: the trainer restores them when batches have been skipped."""
    generators = Generators(device)
    states = random.getstate(), numpy.random.get_state(), generators.states()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        generators.restore(states[2])
