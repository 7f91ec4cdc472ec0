"""Which engine has a parameter: DeepSpeed's functions take only the parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from infinity.engine.engine import Engine

_OF_PARAM: dict[int, weakref.ref[Engine]] = {}
"""By ``id``: an engine holds its parameters, so as long as it is there no other object has their ids."""


def register(engine: Engine) -> None:
    """Have an engine be found by its parameters, as long as it lives."""
    ids = [id(param) for param in engine.module.parameters()]
    reference = weakref.ref(engine)
    for each in ids:
        _OF_PARAM[each] = reference
    weakref.finalize(engine, _forget, ids, reference).atexit = False


def forget(engine: Engine) -> None:
    """Have it not be found any more."""
    for key in [key for key, reference in _OF_PARAM.items() if reference() is engine]:
        del _OF_PARAM[key]


def engine_of(param: object) -> Engine | None:
    """The engine that has a parameter; ``None``: none has."""
    reference = _OF_PARAM.get(id(param)) if isinstance(param, nn.Parameter) else None
    return None if reference is None else reference()


def _forget(ids: Iterable[int], reference: weakref.ref[Engine]) -> None:
    for each in ids:
        if _OF_PARAM.get(each) is reference:
            del _OF_PARAM[each]
