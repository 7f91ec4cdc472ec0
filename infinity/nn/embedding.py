"""``TiledEmbedding``: ``nn.Embedding`` in tiles along its vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import init

from infinity.errors import ModelError
from infinity.nn.draw import NORMAL_RUN, draw_rows
from infinity.nn.tiles import Tile, TiledLayer, own_rows, tile_bounds


class EmbeddingTile(Tile, nn.Embedding):
    """Some of the vectors of a ``TiledEmbedding``; its numbers begin at 0.

    Args:
        weight: shape ``(rows, embedding_dim)``.
        padding_idx: which of its vectors gets no gradient.
        scale_grad_by_freq: as in ``nn.Embedding``.
    """

    def __init__(self, weight: nn.Parameter, padding_idx: int | None, scale_grad_by_freq: bool) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        self.scale_grad_by_freq = scale_grad_by_freq
        self.max_norm, self.norm_type, self.sparse = None, 2.0, False
        self.weight = weight


class TiledEmbedding(TiledLayer):
    """``nn.Embedding`` of which only a tile has to be in device memory at a time.

    Each tile looks up those numbers of the input that are its own, and is called also where there are none, so that its
    parameters have a gradient whenever those of ``nn.Embedding`` have. Outputs and gradients are those of
    ``nn.Embedding``, on the CPU bit for bit; state dicts and, for the same seed, initial values are too. The output
    takes its memory twice for a moment; on an accelerator each forward waits once for it, to learn how many numbers
    each tile has.

    Args:
        num_embeddings: how many vectors there are.
        embedding_dim: the size of each.
        num_tiles: how many tiles, at most ``num_embeddings``.
        padding_idx: a vector that is zero at first and gets no gradient; negative ones count from the end.
        scale_grad_by_freq: divide gradients by how often a number occurs in the input.
        device: where the parameters are made.
        dtype: what they are made in.

    Raises:
        ModelError: ``num_tiles`` is not between 1 and ``num_embeddings``, or ``padding_idx`` is not one of the vectors.
    """

    _kind = "nn.Embedding"
    _names = ("weight",)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        num_tiles: int,
        padding_idx: int | None = None,
        *,
        scale_grad_by_freq: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        bounds = tile_bounds(num_embeddings, num_tiles)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ModelError(f"padding_idx: expected the number of one of {num_embeddings} vectors, got {padding_idx}")
        weights = [
            nn.Parameter(torch.empty(stop - start, embedding_dim, device=device, dtype=dtype)) for start, stop in bounds
        ]
        super().__init__(_tiles(weights, padding_idx, scale_grad_by_freq))
        self.reset_parameters()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, num_tiles: int) -> TiledEmbedding:
        """The same layer in tiles: copies of its rows, or, while its initialisation is deferred, views of them.

        Args:
            embedding: an ``nn.Embedding`` and not of a class made from it, without ``max_norm`` and ``sparse``.
            num_tiles: how many tiles.

        Raises:
            ModelError: it is something else, or ``num_tiles`` is not between 1 and its ``num_embeddings``.
        """
        if type(embedding) is not nn.Embedding:
            raise ModelError(
                f"TiledEmbedding.from_embedding(): expected an nn.Embedding, got a {type(embedding).__name__}"
            )
        if embedding.max_norm is not None or embedding.sparse:
            raise ModelError(
                "TiledEmbedding.from_embedding(): max_norm and sparse are not supported; build it without them"
            )
        return cls.of_weights(own_rows(embedding.weight, tile_bounds(embedding.num_embeddings, num_tiles)), embedding)

    @classmethod
    def of_weights(cls, weights: Sequence[nn.Parameter], like: nn.Embedding) -> TiledEmbedding:
        """A layer of tiles' weights that exist, with the settings of ``like``."""
        layer = cls.__new__(cls)
        TiledLayer.__init__(layer, _tiles(weights, like.padding_idx, like.scale_grad_by_freq))
        return layer.train(like.training)

    @property
    def num_embeddings(self) -> int:
        """How many vectors there are."""
        return self.num_rows

    @property
    def embedding_dim(self) -> int:
        """The size of each vector."""
        return int(self.tiles[0].embedding_dim)  # type: ignore[arg-type]

    @property
    def padding_idx(self) -> int | None:
        """The vector that gets no gradient."""
        for (start, _), tile in zip(self.bounds, self.tiles, strict=True):
            if tile.padding_idx is not None:
                return start + int(tile.padding_idx)  # type: ignore[arg-type]
        return None

    def reset_parameters(self) -> None:
        """Draw new values: those that ``nn.Embedding`` would draw from the same state of the generator."""
        draw_rows(self.parameters_of("weight"), init.normal_, run=NORMAL_RUN)
        with torch.no_grad():
            for tile in self.tiles:
                if tile.padding_idx is not None:
                    tile.weight[tile.padding_idx].fill_(0)  # type: ignore[index]

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Integers of shape ``(...)`` to vectors, ``(..., embedding_dim)``.

        Raises:
            IndexError: a number is not between 0 and ``num_embeddings`` (on the CPU; elsewhere PyTorch's kernel fails).
        """
        flat = numbers.reshape(-1)
        starts = torch.tensor([start for start, _ in self.bounds[1:]], dtype=flat.dtype, device=flat.device)
        tile_of = torch.bucketize(flat, starts, right=True)
        order = torch.argsort(tile_of, stable=True)
        counts = torch.bincount(tile_of, minlength=self.num_tiles).tolist()
        found = [
            tile(own - start)
            for tile, own, (start, _) in zip(self.tiles, flat[order].split(counts), self.bounds, strict=True)
        ]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return F.embedding(place, torch.cat(found)).view(*numbers.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


def _tiles(weights: Sequence[nn.Parameter], padding_idx: int | None, scale_grad_by_freq: bool) -> list[EmbeddingTile]:
    num_rows = sum(len(weight) for weight in weights)
    padding = None if padding_idx is None else padding_idx % num_rows
    tiles, start = [], 0
    for weight in weights:
        own = None if padding is None or not start <= padding < start + len(weight) else padding - start
        tiles.append(EmbeddingTile(weight, own, scale_grad_by_freq))
        start += len(weight)
    return tiles
