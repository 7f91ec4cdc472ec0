"""Architectures of Hugging Face ``transformers``, made from configurations: tiny, with random values, nothing loaded.

Their names and what they are about are known without the package; making one imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import parity_models as models
from families import Family
from parity_models import VOCAB, WIDTH

_SPECIAL = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
_SMALL = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, **_SPECIAL,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 1}


def make(name: str, head: str, fields: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A way to make ``{name}{head}`` from ``{name}Config``."""

    def make_model() -> nn.Module:
        transformers = importlib.import_module("transformers")
        model: nn.Module = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**fields))
        return model.train()

    return make_model


def checkpointed(make_model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With activation checkpoints of its own."""

    def make_checkpointed() -> nn.Module:
        model: Any = make_model()
        new_name: Any = getattr(model, "activation_checkpointing_enable", None)  # the other warns where there are both
        (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    return make_checkpointed


def text_loss(model: nn.Module, seed: int) -> torch.Tensor:
    """Of tokens that are their own labels."""
    [batch] = models.tokens(seed)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def image_loss(model: nn.Module, seed: int) -> torch.Tensor:
    """Of a classification."""
    [batch] = models.images(seed)
    loss: torch.Tensor = model(pixel_values=batch, labels=torch.arange(len(batch))).loss
    return loss


def generate(model: nn.Module) -> list[torch.Tensor]:
    """What ``model.generate`` samples, with its own cache of keys and values."""
    generating: Any = model.eval()
    out = generating.generate(
        models.tokens(77)[0], max_new_tokens=4, do_sample=True, return_dict_in_generate=True, output_logits=True
    )
    model.train()
    return [out.sequences, *out.logits]


_GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, **_SPECIAL}
_T5 = {
    "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0, **_SPECIAL, "pad_token_id": 0,
}  # fmt: skip
_VIT = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8,
    "patch_size": 2, "num_labels": 5,
}  # fmt: skip
_MAMBA = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2, **_SPECIAL
}  # fmt: skip
_OPT = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
    "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH, **_SPECIAL,
}  # fmt: skip
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

FAMILIES: dict[str, Family] = {
    "GPT2": Family("dropout, tied embeddings", make("GPT2", "LMHeadModel", _GPT2), text_loss),
    "Llama": Family(
        "grouped attention; `model.generate` between steps", make("Llama", "ForCausalLM", _GROUPED), text_loss, generate
    ),
    "Mistral": Family("a sliding window", make("Mistral", "ForCausalLM", {**_GROUPED, "sliding_window": 4}), text_loss),
    "Qwen2": Family(
        "`gradient_checkpointing_enable()`", checkpointed(make("Qwen2", "ForCausalLM", _GROUPED)), text_loss
    ),
    "Gemma2": Family(
        "capped logits, windows in every other layer",
        make("Gemma2", "ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
        text_loss,
    ),
    "Bert": Family("masked language model, dropout", make("Bert", "ForMaskedLM", _SMALL), text_loss),
    "T5": Family("encoder and decoder, shared positions", make("T5", "ForConditionalGeneration", _T5), text_loss),
    "ViT": Family("image classification", make("ViT", "ForImageClassification", _VIT), image_loss),
    "Mixtral": Family("experts whose weights are one tensor", make("Mixtral", "ForCausalLM", _EXPERTS), text_loss),
    "Mamba": Family("a selective state space", make("Mamba", "ForCausalLM", _MAMBA), text_loss),
    "Phi": Family("attention and MLP side by side", make("Phi", "ForCausalLM", _SMALL), text_loss),
    "OPT": Family("learned positions", make("OPT", "ForCausalLM", _OPT), text_loss),
}
