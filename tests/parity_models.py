"""Tiny models of many shapes, in plain PyTorch, for the parity tests: ``forward`` takes a batch and returns a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

VOCAB, WIDTH, LENGTH, BATCH = 24, 16, 6, 3
Recompute = Callable[..., Any]


def tokens(seed: int) -> tuple[torch.Tensor, ...]:
    """A batch of token numbers."""
    return (torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed)),)


def images(seed: int) -> tuple[torch.Tensor, ...]:
    """A batch of images."""
    return (torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),)


def vectors(seed: int) -> tuple[torch.Tensor, ...]:
    """A batch of vectors."""
    return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def sequences(seed: int) -> tuple[torch.Tensor, ...]:
    """A batch of sequences of vectors."""
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)),)


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    """No recomputation."""
    return function(*args)


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    """The old kind of activation checkpoint."""
    return checkpoint(function, *args, use_reentrant=True)


def non_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    """The new kind of activation checkpoint."""
    return checkpoint(function, *args, use_reentrant=False)


class Block(nn.Module):
    """A transformer block; ``inner`` recomputes its MLP."""

    def __init__(self, inner: Recompute = plainly, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner = inner
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.inner(self.mlp, x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embeddings tied to the head, dropout, and optional recomputation of blocks (``outer``) or their MLPs."""

    def __init__(self, outer: Recompute = plainly, inner: Recompute = plainly, num_blocks: int = 2) -> None:
        super().__init__()
        self.outer = outer
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(batch.shape[1]))
        for block in self.blocks:
            x = self.outer(block, x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


class SegmentedGPT(GPT):
    """Two blocks per checkpoint."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(batch.shape[1]))
        x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class BorrowingGPT(GPT):
    """The head is a function of the embedding's weight, and positions come as a view of another module's weight."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))

        def forward(self, length: int) -> torch.Tensor:
            return self.weight[:length]

    def __init__(self, outer: Recompute = plainly) -> None:
        super().__init__(outer)
        del self.head
        self.positions = self.Positions()  # type: ignore[assignment]
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.ones(WIDTH)])

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(batch.shape[1])
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = self.outer(block, x * scale)
        return self.outer(lambda h: F.linear(h, self.tokens.weight), self.norm(x))  # type: ignore[no-any-return]


class CNN(nn.Module):
    """Residual blocks with BatchNorm, in channels-last layout."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu_(self.norm(self.conv(x)) + x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(self.Residual(), self.Residual(), self.Residual())
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), torch.arange(len(x)) % 5)


class MLP(nn.Sequential):
    """Leaves only; the first activation works in place."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
        super().__init__(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x.float().square().mean()


class Recurrent(nn.Module):
    """An LSTM of two layers, both ways, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(batch))
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch.flatten())


class ViT(nn.Module):
    """Parameters on the root, passed to its blocks' input."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), patches], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, 0] * self.scale).float(), torch.arange(len(x)) % 5)


class EncoderDecoder(nn.Module):
    """PyTorch's own layers, whose attention reads its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        decoder = nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.source(batch))
        x = self.decoder(self.target(batch.flip(1)), memory)
        x, _ = self.attention(x, memory, memory, need_weights=False)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch.flatten())


class Irregular(nn.Module):
    """A block called twice, one called at random, one never; recomputation optional."""

    def __init__(self, outer: Recompute = plainly) -> None:
        super().__init__()
        self.outer = outer
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=0.0) for _ in range(3))
        self.never = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.outer(self.blocks[0], x)
        if torch.rand(()) < 0.5:
            x = self.outer(self.blocks[1], x)
        x = self.outer(self.blocks[0], self.outer(self.blocks[2], x))
        return x.float().square().mean()


@dataclass
class Result:
    """What ``Outputs`` returns from a unit."""

    hidden: torch.Tensor
    extra: list[torch.Tensor]
    note: str = "none"


class Pair(NamedTuple):
    """What ``Outputs`` returns from another."""

    first: torch.Tensor
    second: torch.Tensor


class Outputs(nn.Module):
    """Units that take and return tuples, dictionaries, dataclasses and named tuples."""

    class Unit(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: dict[str, torch.Tensor], *, scale: float) -> Any:
            first, second = torch.tanh(self.first(inputs["x"])) * scale, self.second(inputs["x"])
            if self.kind == "tuple":
                return first, None, [second]
            if self.kind == "dict":
                return {"first": first, "second": {"deep": second}, "number": 3}
            return Result(first, [second]) if self.kind == "dataclass" else Pair(first, second)

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleDict({kind: self.Unit(kind) for kind in ("tuple", "dict", "dataclass", "pair")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, (second,) = self.units["tuple"]({"x": x}, scale=0.5)
        out = self.units["dict"]({"x": first + second}, scale=2.0)
        result = self.units["dataclass"]({"x": out["first"] + out["second"]["deep"]}, scale=1.0)
        pair = self.units["pair"]({"x": result.hidden + result.extra[0]}, scale=1.0)
        product: torch.Tensor = pair.first * pair.second
        return product.float().sum()


class Complex(nn.Module):
    """Complex weights, which save conjugate and real views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(2))
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(x.float()) * self.filter.conj()
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            z = layer(z) * torch.view_as_real(self.filter).sum() + F.linear(z, layer.weight.conj())
        loss: torch.Tensor = z.abs().square().mean()
        return loss


class Parametrized(nn.Module):
    """Weights that are computed from parameters of other modules when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.normed, self.spectral]:
            x = layer(x)
        return x.float().square().mean()
