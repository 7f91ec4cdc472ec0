"""``tiled_cross_entropy``: the loss over a large vocabulary without the logits of all tokens at a time.

Logits are made for one tile of tokens, reduced to a few numbers for each token, and dropped; backward makes them again.
How that is done follows from what gives the logits, as one object for each behind one contract (``Head``):

* *a layer* is called for each tile of tokens inside an activation checkpoint, so what its hooks do happens in forward
  and again in backward: the engine gathers its parameters each time;
* *a tiled layer* would be read from the first tile to the last for each tile of tokens. So its tiles are the outer
  loop, and each gives what the loss needs of its part of the vocabulary: the log of its sum of exponentials, the
  target's logit if it is there, and the sum of its logits;
* *a weight* is the argument of one autograd function, which saves it as autograd functions do, and reads it once in
  backward. Nothing that runs again later holds on to it: under the engine it would be a placeholder by then. The
  gradient of the weight is summed in one buffer, where a checkpoint for each tile takes two.

Rejected: gradients already computed in forward (right only if the loss is what is differentiated, with no factor
after it, and they would have to be kept); the formula of the gradient written out by hand (its bits would not be those
of ``F.cross_entropy``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from infinity.errors import ModelError
from infinity.nn.linear import TiledLinear
from infinity.nn.tiles import TiledLayer

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Measure: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""Of logits ``(tokens, classes)`` and targets ``(tokens,)``, some numbers for each token: ``(tokens, k)``."""
Head: TypeAlias = "Callable[[Measure, torch.Tensor, torch.Tensor, int], torch.Tensor]"
"""Takes a measure, hidden ``(tokens, features)``, targets, and how many tokens make a tile; gives it for all tokens."""

_LOGITS_BYTES = 64 << 20
_IGNORED = -100


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor | nn.Module,
    target: torch.Tensor,
    *,
    num_tiles: int | None = None,
    tile_tokens: int | None = None,
    bias: torch.Tensor | None = None,
    ignore_index: int = _IGNORED,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` of the logits ``F.linear(hidden, weight, bias)``, one tile of tokens at a time.

    Logits are computed in the dtype of ``hidden``, or autocast's; the loss of them, in fp32 at least.

    Memory beside inputs and gradients, for ``V`` classes and tiles of ``t`` tokens: ``8 * t * V`` bytes in forward
    (``10 * t * V`` where logits have 16 bits), nothing from forward to backward, ``12 * t * V`` in backward. The full
    logits of ``T`` tokens take ``8 * T * V``, ``4 * T * V`` and ``12 * T * V``. With a ``TiledLinear`` of ``n`` tiles
    it is ``1 / n`` of that in forward and ``20 * t * V / n`` in backward. A layer takes the gradient of its weight
    twice while it is summed; a weight does not. Price: the logits are computed twice.

    Numbers: the loss of a token, and so the gradient of its logits, are bit for bit those of ``F.cross_entropy`` where
    PyTorch's product gives a token the same logits in a smaller batch, which its kernels for the CPU do but for a few
    shapes; so is the reduced loss without ``label_smoothing``. The gradient of the weight is a sum over tiles. With a
    ``TiledLinear`` the loss is joined from parts of the vocabulary, and everything is close.

    Args:
        hidden: shape ``(..., features)``.
        weight: shape ``(classes, features)``; or a layer that gives the logits: ``nn.Linear``, ``TiledLinear``, or a
            module with ``out_features`` that maps ``(tokens, features)`` to ``(tokens, classes)``, row by row. Under
            the engine a weight has to be read inside the model's forward, as always; a layer may be called outside.
        target: class numbers, shape ``(...)``, int64.
        num_tiles: how many tiles of tokens; or
        tile_tokens: how many tokens make a tile. Neither: as many as have 64 MiB of logits.
        bias: shape ``(classes,)``, beside a weight.
        ignore_index: targets that do not count.
        reduction: ``"mean"`` over the tokens that count, ``"sum"``, or ``"none"``: shape ``(...)``.
        label_smoothing: between 0 and 1, as in ``F.cross_entropy``.

    Raises:
        ModelError: an argument has another shape, dtype or range; a target is no class.
    """
    if target.shape != hidden.shape[:-1] or target.dtype != torch.int64:
        raise ModelError(
            f"tiled_cross_entropy(): expected a target of class numbers, int64 of shape {tuple(hidden.shape[:-1])} for "
            f"hidden {tuple(hidden.shape)}, got {target.dtype} of shape {tuple(target.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"tiled_cross_entropy(): reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ModelError(f"tiled_cross_entropy(): label_smoothing: expected 0 to 1, got {label_smoothing!r}")
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    counts = classes != ignore_index
    if isinstance(weight, TiledLayer):
        _refuse_bias(bias)
        losses = _over_vocabulary(weight, flat, classes, counts, num_tiles, tile_tokens, label_smoothing)
    else:
        head: Head
        if isinstance(weight, nn.Module):
            _refuse_bias(bias)
            num_classes, head = _num_classes(weight), functools.partial(_through_layer, weight)
        else:
            _check_weight(flat, weight, bias)
            num_classes, head = len(weight), functools.partial(_through_weight, weight, bias)
        _check_classes(classes, counts, num_classes)
        measure = functools.partial(_token_loss, ignore_index=ignore_index, label_smoothing=label_smoothing)
        size = _tile_tokens(len(flat), num_classes, num_tiles, tile_tokens)
        losses = head(measure, flat, classes, size).squeeze(-1)
    return _reduce(losses, counts, reduction).reshape(target.shape if reduction == "none" else ())


def _token_loss(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float) -> torch.Tensor:
    logits = _wide(logits)
    loss = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    return loss.unsqueeze(-1)


def _reduce(losses: torch.Tensor, counts: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """As ``F.cross_entropy`` reduces the losses of tokens: by the same kernel, so in the same order."""
    classes = torch.where(counts, 0, _IGNORED)
    return F.nll_loss(-losses.unsqueeze(-1), classes, ignore_index=_IGNORED, reduction=reduction)


def _over_vocabulary(
    layer: TiledLayer,
    hidden: torch.Tensor,
    target: torch.Tensor,
    counts: torch.Tensor,
    num_tiles: int | None,
    tile_tokens: int | None,
    label_smoothing: float,
) -> torch.Tensor:
    """The loss of each token, from what each tile of a layer says of its classes: ``(tokens,)``."""
    if not isinstance(layer, TiledLinear):
        raise ModelError(
            f"tiled_cross_entropy(): a {type(layer).__name__} gives no logits; make a TiledLinear with as many tiles "
            "and share the weight: linear.tie_weight(embedding)"
        )
    _check_classes(target, counts, layer.out_features)
    size = _tile_tokens(len(hidden), layer.bounds[0][1], num_tiles, tile_tokens)
    parts = [
        _through_layer(tile, functools.partial(_part_of_loss, start=start), hidden.view_as(hidden), target, size)
        for tile, (start, _) in zip(layer.tiles, layer.bounds, strict=True)
    ]
    exponentials, targets, sums = torch.stack(parts).unbind(-1)
    normalizer = exponentials.logsumexp(0)
    losses = normalizer - targets.sum(0)
    if label_smoothing:
        evenly = normalizer - sums.sum(0) / layer.out_features
        losses = (1 - label_smoothing) * losses + label_smoothing * evenly
    return torch.where(counts, losses, 0.0)


def _part_of_loss(logits: torch.Tensor, target: torch.Tensor, start: int) -> torch.Tensor:
    """Of the classes from ``start`` on: log-sum-exp, the target's logit or 0, and the sum of logits."""
    logits = _wide(logits)
    own = target - start
    is_here = (own >= 0) & (own < logits.shape[-1])
    found = logits.gather(-1, torch.where(is_here, own, 0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([logits.logsumexp(-1), torch.where(is_here, found, 0.0), logits.sum(-1)], dim=-1)


def _through_layer(
    layer: nn.Module, measure: Measure, hidden: torch.Tensor, target: torch.Tensor, tile_tokens: int
) -> torch.Tensor:
    """A head that is a module, called once for each tile in forward and once in backward."""

    def run(rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return measure(layer(rows), classes)

    tiles = zip(hidden.split(tile_tokens), target.split(tile_tokens), strict=True)
    return torch.cat([checkpoint(run, rows, classes, use_reentrant=False) for rows, classes in tiles])


def _through_weight(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    measure: Measure,
    hidden: torch.Tensor,
    target: torch.Tensor,
    tile_tokens: int,
) -> torch.Tensor:
    """A head that is a weight, and perhaps a bias."""
    return _Recomputed.apply(measure, tile_tokens, hidden, weight, bias, target)  # type: ignore[no-any-return, no-untyped-call]


class _Recomputed(torch.autograd.Function):
    """A measure of the logits of each tile of tokens, which are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        measure: Measure,
        tile_tokens: int,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
    ) -> torch.Tensor:
        device = hidden.device.type
        ctx.measure, ctx.tile_tokens = measure, tile_tokens
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.save_for_backward(hidden, weight, bias, target)
        with torch.autocast(device, enabled=False):
            weight, bias = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            tiles = zip(hidden.split(tile_tokens), target.split(tile_tokens), strict=True)
            return torch.cat([measure(F.linear(rows.to(ctx.dtype), weight, bias), own) for rows, own in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        _, _, needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with torch.autocast(hidden.device.type, enabled=False):
            wide, offset = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
            of_hidden = torch.empty_like(hidden) if needs_hidden else None
            of_weight = torch.zeros_like(wide) if needs_weight else None
            of_bias = torch.zeros_like(offset) if offset is not None and needs_bias else None
            for start in range(0, len(hidden), ctx.tile_tokens):
                own = slice(start, start + ctx.tile_tokens)
                rows = hidden[own].detach().to(ctx.dtype)
                change = _of_logits(ctx.measure, rows, wide, offset, target[own], gradient[own])
                if of_hidden is not None:
                    of_hidden[own] = change @ wide
                if of_weight is not None:
                    of_weight.addmm_(change.t(), rows)
                if of_bias is not None:
                    of_bias += change.sum(0)
                del change  # before the next tile's logits
        return (
            None,
            None,
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
        )


def _of_logits(
    measure: Measure,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """The gradient of a tile's logits, from that of what a measure makes of them."""
    with torch.enable_grad():
        logits = F.linear(rows.requires_grad_(), weight, bias)
        edge = get_gradient_edge(logits)
        found = measure(logits, target)
    del logits  # so that they are gone before their gradient is made
    return torch.autograd.grad(found, edge, gradient)[0]


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Logits in fp32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _tile_tokens(num_tokens: int, num_classes: int, num_tiles: int | None, tile_tokens: int | None) -> int:
    for name, given in (("num_tiles", num_tiles), ("tile_tokens", tile_tokens)):
        if given is not None and (type(given) is not int or given < 1):
            raise ModelError(f"tiled_cross_entropy(): {name}: expected a positive number, got {given!r}")
    if num_tiles is not None and tile_tokens is not None:
        raise ModelError("tiled_cross_entropy(): expected num_tiles or tile_tokens, got both")
    if tile_tokens is not None:
        return tile_tokens
    if num_tiles is not None:
        return max(-(-num_tokens // num_tiles), 1)
    return max(_LOGITS_BYTES // (4 * max(num_classes, 1)), 1)


def _num_classes(layer: nn.Module) -> int:
    num_classes = getattr(layer, "out_features", None)
    if not isinstance(num_classes, int):
        raise ModelError(
            f"tiled_cross_entropy(): expected a layer that says in out_features how many classes it has, such as "
            f"nn.Linear, got a {type(layer).__name__}; give that attribute to it, or call this with its weight"
        )
    return num_classes


def _refuse_bias(bias: torch.Tensor | None) -> None:
    if bias is not None:
        raise ModelError("tiled_cross_entropy(): bias belongs to a weight; a layer has its own")


def _check_weight(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ModelError(
            f"tiled_cross_entropy(): expected a weight of shape (classes, {hidden.shape[1]}) and a bias of (classes,), "
            f"got {tuple(weight.shape)}" + ("" if bias is None else f" and {tuple(bias.shape)}")
        )
    dtypes = {each.dtype for each in (hidden, weight, bias) if each is not None}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        raise ModelError(
            f"tiled_cross_entropy(): expected hidden, weight and bias of one dtype, got {', '.join(map(str, dtypes))}"
        )


def _check_classes(target: torch.Tensor, counts: torch.Tensor, num_classes: int) -> None:
    wrong = counts & ((target < 0) | (target >= num_classes))
    if bool(wrong.any()):
        raise ModelError(
            f"tiled_cross_entropy(): expected targets below {num_classes} classes or ignore_index, got "
            f"{int(target[wrong][0])}"
        )
