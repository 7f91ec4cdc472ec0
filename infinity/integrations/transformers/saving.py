"""A model under the engine, saved into a directory that may hold other files too, as plain transformers loads it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from infinity.engine.engine import Engine
from infinity.integrations.transformers.exporting import export_pretrained, is_adapted
from infinity.integrations.weights import replace_weights, write_weights


def save_pretrained(engine: Engine, directory: Path, *, writes: bool) -> None:
    """Save the model; of one with adapters, these. All ranks call this, and the others return before the last file.

    Args:
        engine: whose model.
        directory: made if it is not there; other files in it stay.
        writes: whether this rank is the one that writes.

    Raises:
        InfinityError: see ``export_pretrained``.
    """
    model: Any = engine.module
    if hasattr(model, "get_base_model"):  # PEFT's own, which may have adapters that are not trained now
        from infinity.integrations.peft import save_adapters

        save_adapters(engine, directory)
        return
    if is_adapted(model):
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        state = engine.state_dict()
        adapters = {name: state[name] for name in names}
        if writes:
            model.save_pretrained(str(directory), state_dict=adapters)
        return
    if isinstance(model, PreTrainedModel):
        replace_weights(directory, functools.partial(export_pretrained, engine, tokenizer=False), moves=writes)
    else:
        write_weights(engine, directory, moves=writes)
