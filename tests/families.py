"""Model families for the parity table: each a way to make a model, the loss of a batch, and what is done between steps.

Models of ``parity_models`` are used where they have what a family is about; here is what they lack. All are tiny.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import parity_models as models
from parity import MakeModel
from parity_models import GPT, LENGTH, VOCAB, WIDTH

Loss = Callable[[nn.Module, int], torch.Tensor]
"""The loss of a model for the batch with a seed."""


def nothing(model: nn.Module) -> Any:
    """What most families do between steps, beside the evaluation that all do."""
    return None


@dataclass(frozen=True)
class Family:
    """One row of the axis "family".

    Attributes:
        what: what it is about, for the documentation.
        make_model: makes it.
        loss: how it is trained and evaluated.
        between: what is done between two steps, without gradients; what it returns is compared.
    """

    what: str
    make_model: MakeModel
    loss: Loss
    between: Callable[[nn.Module], Any] = nothing


def on(batches: Callable[[int], tuple[torch.Tensor, ...]]) -> Loss:
    """The loss is what ``forward`` returns for a batch."""

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        result: torch.Tensor = model(*batches(seed))
        return result

    return loss


class Mixture(nn.Module):
    """A mixture of experts, two for each sequence: of eight, three sequences leave at least two without work.

    Attributes:
        chosen: the experts of the last forward.
    """

    def __init__(self, num_experts: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False))
            for _ in range(num_experts)
        )
        self.chosen: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        scores, chosen = self.router(normed.mean(1)).topk(2)
        gates = scores.softmax(-1)
        self.chosen = set(chosen.flatten().tolist())
        for index in sorted(self.chosen):
            rows, places = torch.where(chosen == index)
            x = x.index_add(0, rows, self.experts[index](normed[rows]) * gates[rows, places, None, None])
        return x


class MoE(nn.Module):
    """A language model with a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.mixture(self.tokens(batch))).flatten(0, 1).float(), batch.flatten())


class LoRA(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices, neither of them zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = F.linear(F.linear(x, self.down), self.up)
        return change + self.base(x)  # type: ignore[no-any-return]


def lora_gpt() -> GPT:
    """A frozen GPT in which two layers of every block are wrapped."""
    model = GPT()
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, models.Block)
        for owner, name in ((block, "qkv"), (block.mlp, "1")):
            setattr(owner, name, LoRA(getattr(owner, name)))
    return model


class Tree(nn.Module):
    """Calls itself on both halves of a sequence until there is one element, or the data says stop."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(WIDTH, WIDTH)
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 1 or float(x.float().mean()) > 0.1:
            return torch.tanh(self.leaf(x.mean(1)))
        middle = x.shape[1] // 2
        return torch.tanh(self.join(torch.cat([self(x[:, :middle]), self(x[:, middle:])], -1)))


class Recursive(nn.Module):
    """Trees of different depths for every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.trees = nn.ModuleList(Tree() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trees[0](x) + self.trees[1](x.flip(1))
        return F.cross_entropy(self.head(hidden).float(), torch.arange(len(x)) % 5)


class CachedBlock(nn.Module):
    """A block of a transformer that attends to keys and values of before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k = cache["k"] = torch.cat([cache["k"], k], 2) if "k" in cache else k
            v = cache["v"] = torch.cat([cache["v"], v], 2) if "v" in cache else v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        x = x + attended.transpose(1, 2).flatten(2)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Generator(nn.Module):
    """A language model that samples with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(CachedBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def logits(
        self, batch: torch.Tensor, start: int = 0, caches: list[dict[str, torch.Tensor]] | None = None
    ) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(start, start + batch.shape[1]))
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index])
        return self.head(x)  # type: ignore[no-any-return]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(batch)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def generate(model: nn.Module, num_tokens: int = 3) -> list[torch.Tensor]:
    """The tokens that are sampled after a prompt, the last logits, and the cache."""
    assert isinstance(model, Generator)
    [prompt] = models.tokens(77)
    caches: list[dict[str, torch.Tensor]] = [{} for _ in model.blocks]
    model.eval()
    with torch.inference_mode():
        logits = model.logits(prompt, 0, caches)
        tokens = prompt
        for position in range(prompt.shape[1], prompt.shape[1] + num_tokens):
            new = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
            tokens = torch.cat([tokens, new], 1)
            logits = model.logits(new, position, caches)
    model.train()
    return [tokens, logits, *(value for cache in caches for value in cache.values())]


FAMILIES: dict[str, Family] = {
    "mlp": Family("linear layers, an activation in place", models.MLP, on(models.vectors)),
    "cnn": Family("convolutions, BatchNorm, channels last", models.CNN, on(models.images)),
    "gpt": Family("embeddings tied to the head, dropout", GPT, on(models.tokens)),
    "encoder-decoder": Family("PyTorch's own transformer layers", models.EncoderDecoder, on(models.tokens)),
    "vit": Family("parameters of the root, and one without dimensions", models.ViT, on(models.images)),
    "moe": Family("top-2 routing; some of eight experts get no tokens", MoE, on(models.tokens)),
    "lstm": Family("two layers, both ways", models.Recurrent, on(models.tokens)),
    "lora": Family("a frozen GPT with trained additions", lora_gpt, on(models.tokens)),
    "recursive": Family("a module that calls itself, as deep as the data says", Recursive, on(models.sequences)),
    "parametrized": Family("weight_norm and spectral_norm", models.Parametrized, on(models.vectors)),
    "outputs": Family("units that return tuples, dictionaries, dataclasses", models.Outputs, on(models.vectors)),
    "generating": Family(
        "sampling with a cache of keys and values under inference_mode between steps",
        Generator,
        on(models.tokens),
        generate,
    ),
}
