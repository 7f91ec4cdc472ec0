"""``Config.activation_bytes``: saved activations go away and come back bit by bit, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from infinity.config import Config
from infinity.engine import activations
from infinity.engine.activations import Offload
from infinity.engine.engine import Engine
from infinity.errors import BudgetError, EngineStateError, StorageError
from infinity.io.memory import PAGE_BYTES
from infinity.store.order import Access, AccessOrder, Reversal, Use
from infinity.trace import TierUsage
from parity import ENOUGH, Parity, build, tiny_scale
from parity_models import CNN, GPT, BorrowingGPT, Complex, EncoderDecoder, Outputs, Recurrent, non_reentrant, reentrant

__all__ = ["tiny_scale"]

ROOM: dict[str, Any] = {"activation_bytes": "4MiB"}


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 256)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def training(make_batch: Any = models.tokens, *, accumulate: int = 1, num_steps: int = 2) -> Any:
    def script(trainer: Any) -> Any:
        losses = []
        for step in range(num_steps):
            for micro in range(accumulate):
                loss = trainer.model(*make_batch(10 * step + micro))
                losses.append(loss.detach().clone())
                trainer.backward(loss)
            trainer.step()
            with torch.no_grad():
                losses.append(trainer.model(*make_batch(99)).clone())
        return losses

    return script


def away(engine: Engine) -> TierUsage:
    """What is away once everything that nobody needs has gone."""
    gc.collect()

    async def settle() -> None:
        while engine._activations._going:
            await asyncio.wait(engine._activations._going)

    engine._resources.loop.run(settle())
    return engine.usage()["activations"]


@contextlib.contextmanager
def started(tmp_path: Path, make_model: Any = GPT, **fields: Any) -> Iterator[Engine]:
    """An engine from which at the end nothing is away, and whose store holds as many shards as before."""
    model, optimizer = build(make_model, adamw)
    case = Parity(make_model, adamw, lambda trainer: None)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path, **{**ROOM, "debug": True, **fields})) as engine:
        shards = set(engine._store._sizes)
        yield engine
        assert away(engine).used_bytes == 0
        assert engine._activations._keys == {}
        assert engine._activations._numbers == []
        assert engine._orders.activations._due == {}
        assert {key for key in engine._store._sizes if not key.kind.startswith(("state", "grad"))} == shards


# The same numbers


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("bf16", 2), ("fp16", 1)])
def test_numbers_are_those_of_plain_pytorch(precision: str, accumulate: int, recompute: bool, tmp_path: Path) -> None:
    case = Parity(GPT, adamw, training(accumulate=accumulate), precision)
    for config in (case.smallest(tmp_path, **ROOM), case.half(tmp_path, **ROOM), case.resident(tmp_path, **ROOM)):
        engine = case.check(config.model_copy(update={"recompute": recompute, "debug": True}))
        assert engine._activations.usage().peak_bytes > 0
        assert engine._activations.usage().used_bytes == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of a reentrant one, in evaluation
@pytest.mark.parametrize(
    ("make_model", "make_batch"),
    [
        (lambda: GPT(non_reentrant), models.tokens),
        (lambda: GPT(models.plainly, reentrant), models.tokens),
        (BorrowingGPT, models.tokens),
        (EncoderDecoder, models.tokens),
        (Recurrent, models.tokens),
        (CNN, models.images),
        (models.ViT, models.images),
        (Complex, models.vectors),
        (Outputs, models.vectors),
        (models.MLP, models.vectors),
    ],
    ids=["checkpoint", "reentrant", "borrowing", "attention", "lstm", "cnn", "vit", "complex", "outputs", "in place"],
)
def test_all_kinds_of_models(make_model: Any, make_batch: Any, tmp_path: Path) -> None:
    case = Parity(make_model, adamw, training(make_batch))
    case.check(case.blockwise(tmp_path, **ROOM, debug=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_under_backward(accumulate: int, tmp_path: Path) -> None:
    case = Parity(GPT, adamw, training(accumulate=accumulate))
    case.check(case.blockwise(tmp_path, **ROOM, accumulation_steps=accumulate))


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_that_take_turns(recompute: bool, tmp_path: Path) -> None:
    def script(trainer: Any) -> Any:
        losses = []
        for step in range(2):
            batches = [models.tokens(3 * step + number) for number in range(3)]
            losses += trainer.accumulate(batches, lambda batch: trainer.model(*batch) / 3)
            trainer.step()
        return losses

    case = Parity(GPT, adamw, script)
    config = case.smallest(tmp_path, **ROOM, accumulation="vertical", debug=True)
    engine = case.check(config.model_copy(update={"recompute": recompute}))
    assert engine._activations.usage().used_bytes == 0 < engine._activations.usage().peak_bytes


def test_through_host_memory_as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Offload, "_read", Offload._upload)
    case = Parity(lambda: GPT(num_blocks=3), adamw, training(accumulate=2))
    case.check(case.smallest(tmp_path, **ROOM, debug=True))


def test_autocast(tmp_path: Path) -> None:
    def script(trainer: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer.model(*models.tokens(0))
        trainer.backward(loss)
        trainer.step()

    case = Parity(GPT, adamw, script)
    case.check(case.smallest(tmp_path, **ROOM))


# What goes away


def test_what_goes_away_is_moved_and_named_like_any_shard(tmp_path: Path) -> None:
    case = Parity(lambda: GPT(num_blocks=4), adamw, training())
    engine = case.check(case.smallest(tmp_path, **ROOM))
    assert engine.last_step is not None
    moved = engine.last_step.units["blocks.1"].moved_bytes
    assert moved["nvme_write"]["activation"] > 0
    assert moved["nvme_read"]["activation"] >= moved["nvme_write"]["activation"]
    kept = case.check(case.smallest(tmp_path))
    assert kept.last_step is not None
    assert engine.last_step.nvme_written_bytes > kept.last_step.nvme_written_bytes


def test_reads_begin_before_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path, lambda: GPT(num_blocks=6)) as engine:
        store, found = engine._store, []
        real = type(store).read_past

        async def read_past(self: Any, key: Any, *args: Any, **kwargs: Any) -> None:
            found.append(key in self.host.residency)
            await real(self, key, *args, **kwargs)

        monkeypatch.setattr(type(store), "read_past", read_past)
        for seed in range(2):
            engine.backward(engine(*models.tokens(seed)))
            engine.step()
        assert found.count(True) > len(found) / 2


class Shared(nn.Module):
    """Saves a tensor twice by itself and three times through views; and a parameter, a buffer, a piece of data."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, 3 * models.WIDTH)
        self.register_buffer("table", torch.ones(models.WIDTH, models.WIDTH))
        self.scale = nn.Parameter(torch.ones(models.WIDTH, models.WIDTH))
        self.data = torch.randn(64, models.WIDTH, models.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layer(x).chunk(3, -1)
        loss: torch.Tensor = ((first * second * third).sin() @ self.table @ self.scale * self.data[3]).sum()
        return loss


def test_a_storage_goes_once_and_what_the_user_keeps_stays(tmp_path: Path) -> None:
    with started(tmp_path, Shared) as engine:
        x = torch.randn(models.WIDTH, models.WIDTH)
        loss = engine(x)
        # x, what the three chunks are of, the product of two, that of three, the product with the table.
        assert engine.usage()["activations"].used_bytes == 5 * PAGE_BYTES
        engine.backward(loss)
        del loss


def test_what_finds_no_room_stays(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, training(accumulate=2))
    engine = case.check(case.smallest(tmp_path, activation_bytes=5 * PAGE_BYTES))
    assert engine._activations.usage() == TierUsage(0, 5 * PAGE_BYTES, 5 * PAGE_BYTES)


def test_what_is_larger_than_host_memory_stays(tmp_path: Path) -> None:
    def script(trainer: Any) -> Any:
        loss = trainer.model(torch.ones(40000, models.WIDTH))
        trainer.backward(loss)
        trainer.step()
        return loss.detach().clone()

    case = Parity(models.MLP, adamw, script)
    config = case.smallest(tmp_path, activation_bytes="64MiB")
    assert config.ram < 40000 * models.WIDTH * 4
    case.check(config)


def test_without_nvme_it_is_part_of_host_memory(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, training())
    model, optimizer = build(GPT, adamw)
    with pytest.raises(BudgetError, match=r"no nvme, but all state takes .*, activation_bytes 8MiB of it"):
        infinity.initialize(model, optimizer, Config(**ENOUGH, activation_bytes="8MiB"))
    engine = case.check(case.resident(activation_bytes="4MiB"))
    assert engine._activations.usage().peak_bytes > 0


# Lifetimes


def test_a_dropped_graph_and_an_evaluation_leave_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        loss = engine(*models.tokens(0))
        used = away(engine).used_bytes
        assert used > 0
        with torch.no_grad():
            engine(*models.tokens(1))
        assert away(engine).used_bytes == used
        del loss
        assert away(engine).used_bytes == 0
        assert {key for key in engine._store.nvme.versions.live if key.kind == "activation"} == set()  # type: ignore[union-attr]


def test_a_retained_graph_can_be_used_again(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> list[list[torch.Tensor]]:
        params = list(model.parameters())
        loss = model(*models.tokens(0))
        return [list(torch.autograd.grad(loss, params, retain_graph=retain)) for retain in (True, True, False)]

    model, _ = build(GPT, adamw)
    expected = gradients(model)
    with started(tmp_path) as engine:
        torch.manual_seed(1)
        for got in gradients(engine.module):
            assert all(map(torch.equal, got, expected[0]))


def test_a_gradient_of_a_gradient(tmp_path: Path) -> None:
    def gradients(model: nn.Module) -> Any:
        params = list(model.parameters())
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), params, allow_unused=True)

    x = models.vectors(0)[0].requires_grad_()
    model, _ = build(models.MLP, adamw)
    expected = gradients(model)
    with started(tmp_path, models.MLP) as engine:
        for got, wanted in zip(gradients(engine.module), expected, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exception_in_the_middle(in_backward: bool, tmp_path: Path) -> None:
    class Failing(GPT):
        def logits(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.tokens(batch)
            for block in self.blocks:
                x = block(x)
                if fails and in_backward:
                    x.register_hook(fail)
            if fails and not in_backward:
                fail(x)
            return self.head(self.norm(x))  # type: ignore[no-any-return]

    def fail(tensor: torch.Tensor) -> None:
        raise ValueError("on purpose")

    fails = True
    with started(tmp_path, Failing) as engine:
        with pytest.raises(ValueError, match="on purpose"):
            engine.backward(engine(*models.tokens(0)))
        fails = False
        engine.synchronize()  # lets go what the interrupted one holds
        assert away(engine).used_bytes == 0
        engine.backward(engine(*models.tokens(0)))
        engine.step()


def test_a_disk_that_fails_is_an_error_of_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path, lambda: GPT(num_blocks=6)) as engine:
        nvme = engine._store.nvme
        assert nvme is not None
        real = nvme.write

        async def write(key: Any, *args: Any, **kwargs: Any) -> None:
            if key.kind == "activation":
                raise StorageError("no disk", path=tmp_path)
            await real(key, *args, **kwargs)

        monkeypatch.setattr(nvme, "write", write)
        with pytest.raises(StorageError, match="no disk"):
            engine(*models.tokens(0))
        monkeypatch.setattr(nvme, "write", real)
        engine.zero_grad()
        engine.backward(engine(*models.tokens(0)))
        engine.step()


class Change(nn.Module):
    """Changes in place what backward needs: ``through`` the tensor, a view of it, or the one that it is a view of."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, models.WIDTH)
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.layer(x)
        hidden = base.view(-1) if self.through == "base" else base
        loss = hidden.sin().sum()
        changed = {"itself": base, "view": base[0], "base": base, "nothing": base.clone()}[self.through]
        return loss + changed.mul_(2).sum()


@pytest.mark.parametrize("through", ["itself", "view", "base"])
def test_a_change_in_place_is_an_error(through: str, tmp_path: Path) -> None:
    with started(tmp_path, lambda: Change(through)) as engine:
        loss = engine(torch.randn(models.WIDTH, models.WIDTH))
        with pytest.raises(EngineStateError, match=r"of shape .* changed in place .* at version 1, expected 0"):
            engine.backward(loss)
        del loss
        engine.zero_grad()


def test_a_change_of_a_copy_is_none(tmp_path: Path) -> None:
    with started(tmp_path, lambda: Change("nothing")) as engine:
        engine.backward(engine(torch.randn(models.WIDTH, models.WIDTH)))
        engine.zero_grad()


def test_a_graph_outlives_its_engine(tmp_path: Path) -> None:
    with started(tmp_path, activation_bytes=0) as engine:
        pass
    model, optimizer = build(lambda: GPT(num_blocks=6), adamw)
    case = Parity(lambda: GPT(num_blocks=6), adamw, lambda trainer: None)
    with infinity.initialize(model, optimizer, case.blockwise(tmp_path, **ROOM)) as engine:
        loss = engine(*models.tokens(0))
    with pytest.raises(EngineStateError, match="closed"):
        loss.backward()
    del loss
    gc.collect()


# When it is needed


def test_the_latest_is_needed_first_and_each_after_its_unit() -> None:
    order = AccessOrder(lambda access: [access.where])
    order.adopt([Access(Use.GATHER, unit) for unit in (0, 1, 2, 2, 1, 0)])
    things = Reversal(order)
    for unit in (0, 1, 2):
        order.access(Access(Use.GATHER, unit))
        things.add(f"{unit} first", unit)
        things.add(f"{unit} second", unit)
    by_need = sorted((f"{unit} {which}" for unit in range(3) for which in ("first", "second")), key=things.distance)
    assert by_need == ["2 second", "2 first", "1 second", "1 first", "0 second", "0 first"]
    assert 2 < things.distance("0 first") <= 3
    order.access(Access(Use.GATHER, 2))
    order.access(Access(Use.GATHER, 1))
    assert things.distance("1 first") == 0, "its backward has begun"
    things.discard("1 first")
    things.discard("1 first")
    assert things.distance("1 first") == float("inf")


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(activations, "SMALL_BYTES", 64 << 10)
    with started(tmp_path) as engine:
        engine.backward(engine(*models.tokens(0)))
        assert engine.usage()["activations"].peak_bytes == 0
        engine.zero_grad()
