"""Accumulation unit by unit: bitwise the horizontal schedule, and plain PyTorch that seeds alike."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
import parity_models as models
from accidents import PlannedError, momentum, raising
from infinity import Config, Engine, EngineStateError, MicroBatchError, ModelError
from infinity.config import Config as Fields
from parity import Parity, Tiered, Trainer, assert_same, build
from parity import tiny_scale as tiny_scale
from parity_models import GPT, WIDTH
from test_parity import MODELS, SMALL_UNITS, adamw

NUM_MICRO_BATCHES = 3
Batches = Callable[[int], tuple[torch.Tensor, ...]]
Script = Callable[[Trainer], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name] == []


def accumulate(batches: Batches, *, num_steps: int = 2, count: int = NUM_MICRO_BATCHES) -> Script:
    """Steps of so many micro-batches each."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(num_steps):
            micro_batches = [batches(step * count + number) for number in range(count)]
            losses += trainer.accumulate(micro_batches, lambda batch: trainer.model(*batch) / count)
            trainer.step()
        return losses

    return script


def vertical(case: Parity, config: Config) -> Engine:
    """Run and compare in the vertical schedule; the engine, closed."""
    engine = case.check(config.model_copy(update={"accumulation": "vertical"}))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.schedule == "vertical"
    return engine


def num_gathers(engine: Engine) -> int:
    assert engine.last_step is not None
    return engine.last_step.num_gathers


@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("mlp", "lstm", "parametrized", "complex")])
def test_every_kind_of_model(model: str, tmp_path: Path) -> None:
    make_model, batches = MODELS[model]
    case = Parity(make_model, adamw, accumulate(batches))
    fits_smallest = model not in SMALL_UNITS  # these read parameters that start-up cannot know of
    least = case.smallest(tmp_path) if fits_smallest else case.blockwise(tmp_path)
    once = vertical(case, least)
    each = case.check(least.model_copy(update={"accumulation": "horizontal"}))
    assert num_gathers(once) < num_gathers(each) / 2
    case = Parity(make_model, adamw, accumulate(batches), "bf16")
    vertical(case, case.half(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_move_once_however_many_micro_batches(precision: str, tmp_path: Path) -> None:
    gathers = {"horizontal": [], "vertical": []}  # type: dict[str, list[int]]
    for count in (2, 5):
        case = Parity(GPT, adamw, accumulate(models.tokens, count=count), precision)
        for schedule, seen in gathers.items():
            seen.append(num_gathers(case.check(case.smallest(tmp_path, accumulation=schedule))))
    assert gathers["vertical"][0] == gathers["vertical"][1] < gathers["horizontal"][0] < gathers["horizontal"][1]


@pytest.mark.parametrize("outer", [models.reentrant, models.non_reentrant])
def test_recomputation(outer: models.Recompute, tmp_path: Path) -> None:
    case = Parity(lambda: GPT(outer, models.non_reentrant), adamw, accumulate(models.tokens))
    once = vertical(case, case.smallest(tmp_path))
    assert num_gathers(once) < num_gathers(case.check(case.smallest(tmp_path, accumulation="horizontal"))) / 2
    case = Parity(lambda: GPT(outer), adamw, accumulate(models.tokens), "bf16")
    vertical(case, case.blockwise(tmp_path))


def test_recomputation_of_segments_and_of_borrowed_weights(tmp_path: Path) -> None:
    case = Parity(models.SegmentedGPT, adamw, accumulate(models.tokens))
    vertical(case, case.smallest(tmp_path))
    for outer in (models.reentrant, models.non_reentrant):
        case = Parity(lambda outer=outer: models.BorrowingGPT(outer), adamw, accumulate(models.tokens))  # type: ignore[misc]
        vertical(case, case.blockwise(tmp_path))


def test_gradients_that_come_twice_in_one_backward(tmp_path: Path) -> None:
    """A block called twice under reentrant checkpoints: the sums of one micro-batch are complete before the next's."""
    case = Parity(lambda: models.Irregular(models.reentrant), adamw, accumulate(models.sequences))
    vertical(case, case.blockwise(tmp_path))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_under_the_last_backwards(precision: str, tmp_path: Path) -> None:
    begun = []

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(3):
            micro_batches = [models.tokens(step * 4 + number) for number in range(4)]
            for pair in (micro_batches[:2], micro_batches[2:]):
                losses += trainer.accumulate(pair, lambda batch: trainer.model(*batch) / 4)
                if isinstance(trainer, Tiered):
                    begun.append(trainer.engine._steps._open is not None)
            trainer.step()
        return losses

    case = Parity(GPT, adamw, script, precision)
    vertical(case, case.half(tmp_path, accumulation_steps=4))
    assert begun == [False, True] * 3
    vertical(case, case.blockwise(tmp_path))
    assert begun[6:] == [False] * 6


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_loss_scaling_and_clipping(precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[Any]:
        seen = []
        for step in range(3):
            micro_batches = [models.tokens(step * 3 + number) for number in range(3)]
            seen += trainer.accumulate(micro_batches, lambda batch: trainer.model(*batch) / 3)
            seen.append(trainer.clip(0.5))
            trainer.step()
        return seen

    scaler = {"init_scale": 2.0**10, "growth_interval": 2}
    case = Parity(GPT, adamw, script, precision, scaler)
    scales = {"initial_loss_scale": 2.0**10, "loss_scale_window": 2}
    vertical(case, case.smallest(tmp_path, **scales))
    vertical(case, case.half(tmp_path, accumulation_steps=3, max_grad_norm=1e9, **scales))


def test_layers_that_are_frozen_and_thaw(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = GPT()
        model.tokens.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = accumulate(models.tokens)(trainer)
        trainer.model.requires_grad_(True)
        return losses + accumulate(models.tokens)(trainer)

    case = Parity(frozen, adamw, script)
    vertical(case, case.smallest(tmp_path))


class Wayward(nn.Module):
    """The batch says which layers it takes, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.wrap = nn.ModuleList([self.layers[3]])

    def forward(self, x: torch.Tensor, way: list[int]) -> torch.Tensor:
        for number in way:
            x = self.layers[number](x)
        return x.square().mean()


@pytest.mark.parametrize("ways", [
    [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]],
    [[0, 1], [2, 3], [0, 3]],
    [[0, 1, 2, 3, 0], [0], [1, 1, 1], [3, 0]],
    [[2], [1], [0], [0, 1, 2]],
])  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_micro_batches_that_take_different_ways(ways: list[list[int]], precision: str, tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(2):
            batches = [(*models.vectors(10 * step + number), way) for number, way in enumerate(ways)]
            losses += trainer.accumulate(batches, lambda batch: trainer.model(*batch))
            trainer.step()
        return losses

    case = Parity(Wayward, adamw, script, precision)
    vertical(case, case.smallest(tmp_path, units=("Sequential",)))


def test_gradients_are_summed_in_the_order_of_micro_batches(tmp_path: Path) -> None:
    """1 + 1e8 - 1e8 is 0 in this order only; backward comes to the first one's last."""

    def script(trainer: Trainer) -> list[Any]:
        batches = [([0, 1, 2, 3], 1.0), ([3, 1, 2, 0], 1e8), ([3, 2, 1, 0], -1e8)]

        def loss(batch: tuple[list[int], float]) -> torch.Tensor:
            way, scale = batch
            total: torch.Tensor = trainer.model(torch.ones(1, WIDTH), way) * 0
            again: torch.Tensor = trainer.model.get_submodule("layers.0.0")(torch.zeros(1, WIDTH))
            return total + again.sum() * scale

        seen = trainer.accumulate(batches, loss)
        trainer.step()
        return seen

    case = Parity(Wayward, momentum, script)
    vertical(case, case.smallest(tmp_path, units=("Sequential",)))


class Nested(nn.Module):
    """Blocks with parameters of their own around blocks that are units, inside a module that is not the whole model."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.scale * 1.5
            for inner in self.inner:
                x = torch.tanh(inner(x * self.scale)) * scale
            return x * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(self.Outer() for _ in range(2))

    def forward(self, x: torch.Tensor, order: int) -> torch.Tensor:
        for number in (0, 1) if order else (1, 0):
            x = self.outer[number](x)
        return x.square().mean()


@pytest.mark.parametrize("orders", [[0, 0, 0], [0, 1, 0]])
def test_units_around_units_with_the_least_memory_and_with_more(orders: list[int], tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(2):
            batches = [(*models.vectors(10 * step + number), order) for number, order in enumerate(orders)]
            losses += trainer.accumulate(batches, lambda batch: trainer.model(*batch))
            trainer.step()
        return losses

    case = Parity(Nested, adamw, script)
    vertical(case, case.smallest(tmp_path, units=("Sequential", "Outer")))
    vertical(case, case.half(tmp_path, units=("Sequential", "Outer")))


def test_autocast_in_the_loss_and_around_it(tmp_path: Path) -> None:
    def script(trainer: Trainer) -> list[torch.Tensor]:
        def inside(batch: tuple[torch.Tensor]) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return trainer.model(*batch)  # type: ignore[no-any-return]

        losses = []
        for step in range(2):
            losses += trainer.accumulate([models.tokens(2 * step + number) for number in range(2)], inside)
            trainer.step()
        return losses

    case = Parity(GPT, adamw, script)
    vertical(case, case.smallest(tmp_path))

    def around(trainer: Trainer) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return accumulate(models.tokens)(trainer)

    case = Parity(GPT, adamw, around)
    engine = case.check(case.smallest(tmp_path, accumulation="vertical"))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.schedule == "horizontal"
    assert "autocast" in engine.last_accumulation.reason


def test_settings_of_the_calling_thread_hold_in_all(tmp_path: Path) -> None:
    num_packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        num_packed.append(threading.current_thread().name)
        return tensor * 1

    def script(trainer: Trainer) -> list[Any]:
        threads = []

        def loss(batch: tuple[torch.Tensor]) -> torch.Tensor:
            threads.append(torch.get_num_threads())
            return trainer.model(*batch) + torch.zeros(()).to("cpu")  # type: ignore[no-any-return]

        torch.set_num_threads(2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.device("cpu"):
            losses: list[Any] = trainer.accumulate([models.tokens(number) for number in range(3)], loss)
        torch.set_num_threads(1)
        trainer.step()
        return losses + threads

    case = Parity(GPT, adamw, script)
    num_plain = len(num_packed)
    vertical(case, case.smallest(tmp_path))
    assert {name for name in num_packed[num_plain:] if "micro-batch" in name} == {
        f"infinity-micro-batch-{number}" for number in range(3)
    }


def test_the_choice(tmp_path: Path) -> None:
    case = Parity(GPT, adamw, accumulate(models.tokens))

    def chosen(**fields: Any) -> tuple[str, str]:
        engine = case.check(case.smallest(tmp_path, **fields))
        assert engine.last_accumulation is not None
        assert engine.last_accumulation.num_micro_batches == NUM_MICRO_BATCHES
        return engine.last_accumulation.schedule, engine.last_accumulation.reason

    assert Fields.model_fields["accumulation"].default == "horizontal"
    schedule, reason = chosen(accumulation="auto")
    assert schedule == "horizontal"
    assert "set recompute or activation_bytes" in reason
    assert chosen(accumulation="vertical") == ("vertical", "as configured")
    for fields in ({"recompute": True}, {"activation_bytes": "1MiB"}):
        schedule, reason = chosen(accumulation="auto", **fields)
        assert schedule == "vertical"
        assert "hbm does not hold all units" in reason
    assert chosen(accumulation="horizontal") == ("horizontal", "as configured")
    engine = case.check(case.resident(accumulation="auto"))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.schedule == "horizontal"
    assert "hbm holds all units" in engine.last_accumulation.reason
    case = Parity(GPT, adamw, accumulate(models.tokens, count=1))
    engine = case.check(case.smallest(tmp_path, accumulation="vertical"))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.reason == "there is one micro-batch"


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_threads_are_made_for_the_vertical_schedule_only(schedule: str, tmp_path: Path) -> None:
    seen = []
    with start(tmp_path, schedule) as engine:

        def loss(batch: tuple[torch.Tensor]) -> torch.Tensor:
            seen.append(threading.current_thread() is threading.main_thread())
            return engine(*batch)  # type: ignore[no-any-return]

        engine.accumulate([models.tokens(0), models.tokens(1)], loss)
    assert seen == [schedule == "horizontal"] * 2


# What goes wrong


def start(directory: Path, schedule: str, **fields: Any) -> Engine:
    model, optimizer = build(GPT, momentum)
    model.eval()  # no dropout: what fails must not draw random numbers
    return infinity.initialize(
        model, optimizer, Config(device="cpu", hbm="48KiB", ram="1MiB", nvme=directory, accumulation=schedule, **fields)
    )


def good_step(engine: Engine, seed: int = 0) -> list[torch.Tensor]:
    losses = engine.accumulate([models.tokens(seed + number) for number in range(3)], lambda batch: engine(*batch))
    engine.step()
    return losses


def no_tensor(engine: Engine, batch: Any) -> Any:
    return engine(*batch).item()


def no_graph(engine: Engine, batch: Any) -> Any:
    return engine(*batch).detach()


def several_losses(engine: Engine, batch: Any) -> Any:
    return engine(*batch).expand(2)


def error_in_forward(engine: Engine, batch: Any) -> Any:
    with torch.no_grad():
        engine(*batch)
    raise PlannedError


def error_in_a_hook_of_forward(engine: Engine, batch: Any) -> Any:
    me = threading.get_ident()  # others pass here while this one waits

    def fail(*_: object) -> None:
        if threading.get_ident() == me:
            raise PlannedError

    handle = engine.module.get_submodule("blocks.1.mlp").register_forward_hook(fail)
    try:
        return engine(*batch)
    finally:
        handle.remove()


def error_in_backward(engine: Engine, batch: Any) -> Any:
    outputs, me = [], threading.get_ident()

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if threading.get_ident() == me:
            outputs.append(output)

    handle = engine.module.get_submodule("blocks.0").register_forward_hook(keep)
    loss = engine(*batch)
    handle.remove()
    outputs[0].register_hook(raising(PlannedError))
    return loss


def backward_inside(engine: Engine, batch: Any) -> Any:
    engine.backward(engine(*batch))
    return engine(*batch)


def step_inside(engine: Engine, batch: Any) -> Any:
    engine.step()


def accumulate_inside(engine: Engine, batch: Any) -> Any:
    engine.accumulate([batch], lambda each: engine(*each))


def zero_grad_inside(engine: Engine, batch: Any) -> Any:
    engine.zero_grad()


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize(("fault", "kind"), [
    (no_tensor, ModelError), (no_graph, ModelError), (several_losses, ModelError), (error_in_forward, PlannedError),
    (error_in_a_hook_of_forward, PlannedError), (error_in_backward, PlannedError), (backward_inside, EngineStateError),
    (step_inside, EngineStateError), (accumulate_inside, EngineStateError), (zero_grad_inside, EngineStateError),
])  # fmt: skip
def test_a_micro_batch_that_fails(
    fault: Callable[[Engine, Any], Any], kind: type[Exception], schedule: str, tmp_path: Path
) -> None:
    with start(tmp_path, schedule) as engine:
        expected = [good_step(engine), good_step(engine, 10)]
        expected_weights = dict(engine.state_dict())
    with start(tmp_path, schedule) as engine:
        seen = [good_step(engine)]
        for index in range(3):
            numbers = iter(range(3))

            def loss(batch: Any) -> Any:
                return fault(engine, batch) if next(numbers) == index else engine(*batch)  # noqa: B023

            random_state = torch.get_rng_state()
            with pytest.raises(MicroBatchError, match=rf"micro-batch {index} of 3 \({schedule}") as caught:
                engine.accumulate([models.tokens(20 + number) for number in range(3)], loss)
            assert caught.value.index == index
            assert isinstance(caught.value.__cause__, kind)
            assert all(param.grad is None for param in engine.module.parameters())
            torch.set_rng_state(random_state)
        seen.append(good_step(engine, 10))
        assert_same(seen, expected, "losses")
        assert_same(dict(engine.state_dict()), expected_weights, "weights")


@pytest.mark.parametrize("where", ["blocks.0", "blocks.1.mlp", "norm"])
def test_an_interrupt_unwinds_all_micro_batches(where: str, tmp_path: Path) -> None:
    unwound = []
    with start(tmp_path, "vertical") as engine:
        expected = good_step(engine)

        def interrupt(*_: object) -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while True:  # what runs goes on until it is told at a unit
                engine.module.get_submodule("tokens")(torch.zeros(1, dtype=torch.long))

        def loss(batch: Any) -> torch.Tensor:
            try:
                return engine(*batch)  # type: ignore[no-any-return]
            except BaseException as error:
                unwound.append(type(error).__name__)
                raise

        handle = engine.module.get_submodule(where).register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.accumulate([models.tokens(number) for number in range(3)], loss)
        handle.remove()
        assert unwound == ["Unwound"] * 3
    with start(tmp_path, "vertical") as engine:
        assert_same(good_step(engine), expected, "losses")


def test_arguments_and_places_that_are_refused(tmp_path: Path) -> None:
    with start(tmp_path, "vertical", accumulation_steps=2) as engine:

        def loss(batch: Any) -> torch.Tensor:
            return engine(*batch)  # type: ignore[no-any-return]

        with pytest.raises(ModelError, match="no micro-batches"):
            engine.accumulate([], loss)
        with pytest.raises(EngineStateError, match="gradients are disabled"), torch.no_grad():
            engine.accumulate([models.tokens(0)], loss)
        with pytest.raises(EngineStateError, match="got 3 micro-batches, but accumulation_steps=2 leaves 2"):
            engine.accumulate([models.tokens(number) for number in range(3)], loss)
        engine.module.register_forward_pre_hook(lambda *_: engine.accumulate([0], loss) and None)
        with pytest.raises(EngineStateError, match="inside a forward or backward"):
            engine(*models.tokens(0))
