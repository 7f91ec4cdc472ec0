"""``Config.recompute``: bitwise plain PyTorch, with its own checkpoints around the same blocks and without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
import parity_models as models
from infinity.config import Config
from infinity.engine.wrap import find_blocks
from infinity.errors import ConfigError
from parity import ENOUGH, Parity, build, tiny_scale
from parity_models import CNN, GPT, MLP, BorrowingGPT, EncoderDecoder, Irregular, Outputs, non_reentrant, reentrant

__all__ = ["tiny_scale"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def training(
    make_batch: Any = models.tokens, *, accumulate: int = 1, num_steps: int = 2, autocast: bool = False
) -> Any:
    def script(trainer: Any) -> Any:
        losses = []
        for step in range(num_steps):
            for micro in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = trainer.model(*make_batch(10 * step + micro))
                losses.append(loss.detach().clone())
                trainer.backward(loss)
            trainer.step()
            trainer.model.eval()
            with torch.no_grad():
                losses.append(trainer.model(*make_batch(99)).clone())
            trainer.model.train()
        return losses

    return script


@pytest.mark.parametrize("plain", [models.plainly, non_reentrant], ids=["against plain", "against checkpoint"])
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2), ("fp16", 1)])
def test_numbers_are_those_of_plain_pytorch(precision: str, accumulate: int, plain: Any, tmp_path: Path) -> None:
    case = Parity(lambda: GPT(plain), adamw, training(accumulate=accumulate), precision)
    case.make_model = GPT
    for config in (case.smallest(tmp_path), case.half(tmp_path), case.resident()):
        case.check(config.model_copy(update={"recompute": True}))


def test_autocast_is_that_of_forward(tmp_path: Path) -> None:
    case = Parity(lambda: GPT(non_reentrant), adamw, training(autocast=True))
    case.make_model = GPT
    case.check(case.half(tmp_path, recompute=True))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_under_backward(accumulate: int, tmp_path: Path) -> None:
    case = Parity(GPT, adamw, training(accumulate=accumulate))
    case.check(case.blockwise(tmp_path, recompute=True, accumulation_steps=accumulate))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of reentrant ones, in evaluation
@pytest.mark.parametrize(
    ("make_model", "make_batch"),
    [
        (lambda: GPT(non_reentrant), models.tokens),
        (lambda: GPT(reentrant), models.tokens),
        (lambda: GPT(models.plainly, non_reentrant), models.tokens),
        (lambda: GPT(models.plainly, reentrant), models.tokens),
        (models.SegmentedGPT, models.tokens),
        (BorrowingGPT, models.tokens),
        (lambda: BorrowingGPT(reentrant), models.tokens),
        (EncoderDecoder, models.tokens),
        (models.ViT, models.images),
        (Irregular, models.vectors),
    ],
    ids=[
        "around", "reentrant around", "inside", "reentrant inside", "segments", "borrowing", "borrowing reentrant",
        "attention", "vit", "irregular",
    ],
)  # fmt: skip
def test_models_that_checkpoint_themselves_or_borrow_weights(make_model: Any, make_batch: Any, tmp_path: Path) -> None:
    make_batch = models.sequences if make_model is Irregular else make_batch
    case = Parity(make_model, adamw, training(make_batch))
    case.check(case.blockwise(tmp_path, recompute=True))


def test_keyword_arguments_dictionaries_and_whatever_blocks_return(tmp_path: Path) -> None:
    case = Parity(Outputs, adamw, training(models.vectors))
    case.check(case.smallest(tmp_path, recompute=True, units=("Unit",)))


def test_buffers_change_twice_as_under_checkpoint(tmp_path: Path) -> None:
    class Checkpointed(CNN):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x.contiguous(memory_format=torch.channels_last))
            for block in self.blocks:
                x = non_reentrant(block, x)
            return F.cross_entropy(self.head(x.mean((2, 3))).float(), torch.arange(len(x)) % 5)

    case = Parity(Checkpointed, adamw, training(models.images))
    case.make_model = CNN
    case.check(case.blockwise(tmp_path, recompute=True))


def saved_bytes(model: nn.Module) -> int:
    """What autograd keeps of a forward, parameters left out."""
    sizes = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes if not isinstance(tensor, nn.Parameter) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(*models.tokens(0))
    return sum(sizes)


def test_blocks_keep_their_inputs_only_and_are_left_as_they_were() -> None:
    model, optimizer = build(lambda: GPT(num_blocks=6), adamw)
    before = [dict(vars(module)) for module in model.modules()]
    with infinity.initialize(model, optimizer, Config(**ENOUGH)):
        kept = saved_bytes(model)
    model, optimizer = build(lambda: GPT(num_blocks=6), adamw)
    with infinity.initialize(model, optimizer, Config(**ENOUGH, recompute=True)):
        assert saved_bytes(model) < kept / 3
    assert [set(vars(module)) for module in model.modules()] >= [set(each) for each in before]
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_which_modules_are_recomputed() -> None:
    gpt = GPT()
    assert list(find_blocks(gpt, "auto", setting="recompute").values()) == list(gpt.blocks)
    assert next(iter(find_blocks(gpt, ("LayerNorm",), setting="recompute").values())) is gpt.blocks[0].norm
    twice = nn.Sequential(gpt.blocks[0], gpt.blocks[0], gpt.blocks[1])
    assert list(find_blocks(twice, "auto", setting="recompute").values()) == [gpt.blocks[0], gpt.blocks[1]]


def test_layers_in_tiles_are_recomputed_with_their_block(tmp_path: Path) -> None:
    def tiled() -> GPT:
        model = GPT()
        infinity.tile_large_layers(model, 700)
        return model

    model = tiled()
    assert list(find_blocks(model, "auto", setting="recompute").values()) == list(model.blocks)
    case = Parity(tiled, adamw, training())
    case.check(case.blockwise(tmp_path, recompute=True))


def test_a_model_without_blocks_is_refused() -> None:
    model, optimizer = build(MLP, adamw)
    with pytest.raises(ConfigError, match=r"recompute: expected a model with repeated blocks .* found none in MLP"):
        infinity.initialize(model, optimizer, Config(**ENOUGH, recompute=True))
    assert all(param.isfinite().all() for param in model.parameters())
    with pytest.raises(ConfigError, match="units: the model has no module of class 'Linaer'"):
        list(find_blocks(model, ("Linaer",), setting="recompute").values())
