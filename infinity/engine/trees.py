"""Tensors in what modules take and return: any nesting of containers and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``tree``."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_of(getattr(leaf, field.name, None))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor changed, in new containers and dataclasses."""

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaf = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                if hasattr(leaf, field.name):
                    object.__setattr__(leaf, field.name, map_tensors(change, getattr(leaf, field.name)))
        return leaf

    return pytree.tree_map(on_leaf, tree)
