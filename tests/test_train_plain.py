from __future__ import annotations

import os

import pytest
import torch
from torch._dynamo.utils import counters

from infinity.config import Config, Precision
from infinity.train.data import Batch
from infinity.train.model import GPT, GPTShape
from infinity.train.plain import PlainTrainer
from infinity.train.run import train_step
from infinity.train.settings import TrainSettings
from infinity.train.trainer import deterministic_kernels, make_trainer

SHAPE = GPTShape(num_layers=2, hidden_size=32, num_heads=2, seq_length=16, vocab_size=256)
CPU = torch.device("cpu")


def make(precision: Precision) -> PlainTrainer:
    torch.manual_seed(0)
    return PlainTrainer(GPT(SHAPE), learning_rate=1e-2, config=Config(precision=precision), device=CPU)


def batches(count: int, batch_size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    windows = torch.randint(256, (count, batch_size, 17), generator=generator)
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def losses_of(trainer: PlainTrainer, *, num_steps: int, accumulate: int) -> list[float]:
    drawn = batches(num_steps * accumulate)
    return [train_step(trainer, drawn[step * accumulate : (step + 1) * accumulate]) for step in range(num_steps)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_bitwise_reproducible(precision: Precision, accumulate: int) -> None:
    first, second = make(precision), make(precision)
    assert losses_of(first, num_steps=4, accumulate=accumulate) == losses_of(second, num_steps=4, accumulate=accumulate)
    for name, weight in first.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, second.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo
def test_compiled_blocks_give_what_they_give_under_the_engine() -> None:
    settings = TrainSettings(layers=2, hidden=32, heads=2, seq=16)
    config = Config(device="cpu", hbm="2MiB", ram="16MiB", compile=True, compile_backend="aot_eager")
    losses, num_graphs = [], []
    for plain in (True, False):
        torch._dynamo.reset()
        counters.clear()
        trainer = make_trainer(settings.model_copy(update={"plain": plain}), config, CPU)
        losses.append([train_step(trainer, [batch]) for batch in batches(3)])
        num_graphs.append(counters["stats"]["unique_graphs"])
        trainer.close()
    torch._dynamo.reset()
    assert losses[0] == losses[1]
    assert num_graphs == [1, 1]


def test_it_learns_what_it_sees_again_and_again() -> None:
    trainer, [batch] = make("fp32"), batches(1)
    losses = [train_step(trainer, [batch]) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_fp32_is_adamw_on_the_mean_of_the_micro_batches() -> None:
    trainer = make("fp32")
    torch.manual_seed(0)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        micro_batches = batches(6)[2 * step : 2 * step + 2]
        losses = [model(*batch) for batch in micro_batches]
        assert train_step(trainer, micro_batches) == (losses[0].item() + losses[1].item()) / 2
        for loss in losses:
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in trainer.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_bf16_sums_gradients_in_fp32_and_steps_fp32_masters() -> None:
    trainer = make("bf16")
    torch.manual_seed(0)
    model = GPT(SHAPE)
    masters = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    model.bfloat16()
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    for step in range(3):
        micro_batches = batches(6)[2 * step : 2 * step + 2]
        train_step(trainer, micro_batches)
        gradients = []
        for batch in micro_batches:
            model.zero_grad()
            (model(*batch) / 2).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        for name, master in masters.items():
            first, second = (gradient[name] for gradient in gradients)
            assert first is not None
            assert second is not None
            master.grad = first.float() + second.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    for name, weight in trainer.state_dict().items():
        assert torch.equal(weight, masters[name]), name
    for name, parameter in trainer.module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16()), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_bytes_count_what_is_in_memory_when_gradients_are(precision: Precision) -> None:
    trainer = make(precision)
    train_step(trainer, batches(1))
    tensors = {id(p): p for p in [*trainer.module.parameters(), *trainer.masters]}.values()
    moments = [
        value for state in trainer.optimizer.state.values() for name, value in state.items() if name.startswith("exp_")
    ]
    num_bytes = 2 * sum(tensor.nbytes for tensor in tensors) + sum(moment.nbytes for moment in moments)
    assert trainer.state_bytes == num_bytes


def test_an_accelerator_is_asked_for_deterministic_kernels_for_as_long_as_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with deterministic_kernels(CPU):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
