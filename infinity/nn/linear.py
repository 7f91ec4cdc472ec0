"""``TiledLinear``: ``nn.Linear`` in tiles along its output features."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import init

from infinity.errors import ModelError
from infinity.nn.draw import UNIFORM_RUN, draw_rows
from infinity.nn.tiles import Tile, TiledLayer, own_rows, tile_bounds


class LinearTile(Tile, nn.Linear):
    """Some of the output features of a ``TiledLinear``.

    Args:
        weight: shape ``(rows, in_features)``.
        bias: shape ``(rows,)``.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.register_parameter("bias", bias)


class TiledLinear(TiledLayer):
    """``nn.Linear`` of which only a tile has to be in device memory at a time.

    The output features are divided into ``num_tiles`` tiles, each with parameters of its own. State dicts and, for the
    same seed, initial values are those of ``nn.Linear``. The numbers:

    * under the engine and in plain PyTorch those of this layer are the same, bit for bit;
    * beside an untiled layer, outputs and gradients of weight and bias are the same sums, in the order of whatever
      kernel PyTorch takes for the smaller product: on many shapes bitwise the same, on others rounded differently;
    * the gradient of the input is a sum over tiles, added up in the dtype of the input: each of the ``num_tiles``
      products and each of the sums rounds once, so in bf16 prefer few tiles.

    An optimizer that steps element by element (AdamW, SGD) steps tiles as it would the layer; one that looks at whole
    parameters (Adafactor, Muon, LARS) looks at each tile.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: whether there is one.
        num_tiles: how many tiles, at most ``out_features``.
        device: where the parameters are made.
        dtype: what they are made in.

    Raises:
        ModelError: ``num_tiles`` is not between 1 and ``out_features``.
    """

    _kind = "nn.Linear"
    _names = ("weight", "bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_tiles: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = [stop - start for start, stop in tile_bounds(out_features, num_tiles)]
        super().__init__([LinearTile(empty(n, in_features), empty(n) if bias else None) for n in rows])
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, num_tiles: int) -> TiledLinear:
        """The same layer in tiles: copies of its rows, or, while its initialisation is deferred, views of them.

        Args:
            linear: an ``nn.Linear`` and not of a class made from it, whose forward could be another.
            num_tiles: how many tiles.

        Raises:
            ModelError: it is something else, or ``num_tiles`` is not between 1 and its ``out_features``.
        """
        if type(linear) is not nn.Linear:
            raise ModelError(f"TiledLinear.from_linear(): expected an nn.Linear, got a {type(linear).__name__}")
        bounds = tile_bounds(linear.out_features, num_tiles)
        weights = own_rows(linear.weight, bounds)
        bias = linear._parameters["bias"]
        biases = [None] * num_tiles if bias is None else own_rows(bias, bounds)
        return cls.of_tiles(list(map(LinearTile, weights, biases))).train(linear.training)

    @classmethod
    def of_tiles(cls, tiles: Sequence[LinearTile]) -> TiledLinear:
        """A layer of tiles that exist."""
        layer = cls.__new__(cls)
        TiledLayer.__init__(layer, tiles)
        return layer

    @property
    def in_features(self) -> int:
        """Size of the last dimension of the input."""
        return int(self.tiles[0].in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        """Size of the last dimension of the output."""
        return self.num_rows

    def reset_parameters(self) -> None:
        """Draw new values: those that ``nn.Linear`` would draw from the same state of the generator."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        weights, biases = self.parameters_of("weight"), self.parameters_of("bias")
        draw_rows(weights, lambda weight: init.kaiming_uniform_(weight, a=math.sqrt(5)), run=UNIFORM_RUN)
        draw_rows(biases, lambda bias: init.uniform_(bias, -bound, bound), run=UNIFORM_RUN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape ``(..., in_features)`` to ``(..., out_features)``; a copy of the tiles' outputs, which go."""
        # A view for each: its gradient is complete when this tile's backward is, and not when that of all tiles is.
        return torch.cat([tile(x.view_as(x)) for tile in self.tiles], dim=-1)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        has_bias = bool(self.parameters_of("bias"))
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"
