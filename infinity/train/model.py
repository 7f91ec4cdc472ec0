"""A decoder-only transformer of the GPT-2 kind, in plain PyTorch: nothing in it knows of infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of a ``GPT``.

    Attributes:
        num_layers: blocks.
        hidden_size: width of the residual stream; a multiple of ``num_heads``.
        num_heads: attention heads per block.
        seq_length: longest sequence, in tokens.
        vocab_size: distinct tokens.
        recompute: drop each block's activations after its forward and compute them again in backward.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    recompute: bool = False


class Block(nn.Module):
    """Causal self-attention and a four times wider GELU MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        hidden_size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.attention_out = nn.Linear(hidden_size, hidden_size)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp_in = nn.Linear(hidden_size, 4 * hidden_size)
        self.mlp_out = nn.Linear(4 * hidden_size, hidden_size)
        for linear in (self.query_key_value, self.mlp_in):
            _initialize(linear, _INIT_STD)
        for linear in (self.attention_out, self.mlp_out):  # 2 * num_layers of these add up in the residual stream
            _initialize(linear, _INIT_STD / math.sqrt(2 * shape.num_layers))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map the residual stream of shape (batch, seq, hidden) to the same shape."""
        heads = self.query_key_value(self.attention_norm(stream)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, hidden / heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + hidden


class GPT(nn.Module):
    """Token and learned position embeddings, ``num_layers`` blocks, a final LayerNorm, a head tied to the embedding."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.recompute = shape.recompute
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.position_embedding = nn.Embedding(shape.seq_length, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        nn.init.normal_(self.token_embedding.weight, std=_INIT_STD)
        nn.init.normal_(self.position_embedding.weight, std=_INIT_STD)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the next token at every position.

        Args:
            tokens: int64, of shape (batch, seq), seq at most ``seq_length``.
            targets: int64, of the same shape: the token that follows each one.

        Returns:
            With ``targets`` the mean cross-entropy in nats, an fp32 scalar whatever the parameters' dtype; without
            them the logits, of shape (batch, seq, vocab).
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.token_embedding(tokens) + self.position_embedding(positions)
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False) if recompute else block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _initialize(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
