"""``Config.compile``: the numbers of plain PyTorch whose blocks are compiled, whatever the budgets."""

from __future__ import annotations

import gc
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo
from torch._inductor import config as inductor
from torch._inductor import cpp_builder, exc
from torch.nn import functional as F

import infinity
import parity_models as models
from infinity import BudgetError, Config, ConfigError, ModelError
from infinity.engine.wrap import find_blocks
from parity import ENOUGH, Parity, Script, Trainer
from parity import tiny_scale as tiny_scale
from parity_models import GPT, WIDTH

Make = Callable[[], nn.Module]
Batches = Callable[[int], tuple[torch.Tensor, ...]]
pytestmark = [  # of torch's compilers themselves, with and without the engine
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}


def start_afresh() -> None:
    """Forget what has been compiled, and how much."""
    torch._dynamo.reset()
    dynamo.counters.clear()


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    start_afresh()
    yield
    start_afresh()


def num_graphs() -> int:
    return dynamo.counters["stats"]["unique_graphs"]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_compiled_blocks(make: Make, backend: str) -> Make:
    """As users do it without the engine."""

    def make_compiled() -> nn.Module:
        model = make()
        for block in find_blocks(model, "auto", setting="compile").values():
            block.forward = torch.compile(block.forward, backend=backend)
        return model

    return make_compiled


def train(batches: Batches) -> Script:
    """Two steps of two backwards, and evaluation of both kinds between them."""

    def script(trainer: Trainer) -> list[torch.Tensor]:
        losses = []
        for step in range(2):
            for micro in range(2):
                loss = trainer.model(*batches(2 * step + micro))
                trainer.backward(loss)
                losses.append(loss.detach())
            trainer.step()
            trainer.model.eval()
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    losses.append(trainer.model(*batches(9)).clone())
            trainer.model.train()
        return losses

    return script


def accumulate(trainer: Trainer) -> list[torch.Tensor]:
    """Two steps of three micro-batches."""
    losses = []
    for step in range(2):
        micro_batches = [models.tokens(3 * step + micro) for micro in range(3)]
        losses += trainer.accumulate(micro_batches, lambda batch: trainer.model(*batch))
        trainer.step()
    return losses


def compiled_case(
    make: Make, script: Script, precision: str = "fp32", backend: str = "aot_eager"
) -> tuple[Parity, int]:
    """The case, whose reference compiles its blocks, and how many graphs that took."""
    case = Parity(with_compiled_blocks(make, backend), adam, script, precision)
    case.make_model = make
    reference = num_graphs()
    start_afresh()
    return case, reference


CASES: dict[str, tuple[Make, Script]] = {
    "gpt": (GPT, train(models.tokens)),
    "non-reentrant": (lambda: GPT(models.non_reentrant), train(models.tokens)),
    "recompute inside": (lambda: GPT(inner=models.non_reentrant), train(models.tokens)),
    "cnn": (models.CNN, train(models.images)),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt", "fp32"), ("gpt", "fp16"), ("non-reentrant", "bf16"), ("recompute inside", "fp32"), ("cnn", "bf16")],
)
def test_parity_with_compiled_blocks_and_no_more_graphs(name: str, precision: str, tmp_path: Path) -> None:
    case, reference = compiled_case(*CASES[name], precision)
    case.check(case.smallest(tmp_path, **COMPILED, debug=True))
    case.check(case.half(tmp_path, **COMPILED, debug=True, accumulation_steps=2))
    case.check(case.resident(**COMPILED, overlap=False))
    assert num_graphs() == reference


@pytest.mark.parametrize("accumulation", ["horizontal", "vertical"])
def test_parity_of_micro_batches_in_either_order(accumulation: str, tmp_path: Path) -> None:
    case, reference = compiled_case(lambda: GPT(models.non_reentrant), accumulate)
    engine = case.check(case.smallest(tmp_path, **COMPILED, debug=True, accumulation=accumulation))
    assert engine.last_accumulation is not None
    assert engine.last_accumulation.schedule == accumulation
    assert num_graphs() == reference


def test_equal_blocks_share_one_compilation_wherever_their_memory_is(tmp_path: Path) -> None:
    model = GPT(num_blocks=4)
    with infinity.initialize(model, adam(model), Config(**{**ENOUGH, **COMPILED, "nvme": tmp_path})) as engine:
        for step in range(3):
            engine.backward(engine(*models.tokens(step)))
            engine.step()
            assert num_graphs() == 1


def test_weights_are_saved_as_handles_and_not_kept(tmp_path: Path) -> None:
    model = GPT()
    with infinity.initialize(model, adam(model), Config(**{**ENOUGH, **COMPILED, "nvme": tmp_path})) as engine:
        loss = engine(*models.tokens(0))
        of_blocks = [unit for unit in engine._units if unit.name.startswith("blocks.")]
        assert of_blocks
        assert all(unit.handles for unit in of_blocks)
        assert all(unit.buffer is None for unit in of_blocks)
        engine.backward(loss)
        assert not any(unit.handles for unit in of_blocks)


class Residual(nn.Module):
    """A block; ``kind`` says what is special about it."""

    def __init__(self, kind: str, other: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.hidden = (other,)  # not registered
        if kind == "tied":
            self.linear.weight = other.weight
        if kind == "shared":
            self.other = other

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.kind == "raises" and x.shape[0] == 1:
            raise ValueError("one is too few")
        if self.kind == "reads":
            x = x + F.linear(x, self.hidden[0].weight)
        if self.kind == "calls":
            x = x + self.hidden[0](x)
        if self.kind == "shared":
            x = x + torch.tanh(self.other(x))
        x = x + torch.tanh(self.linear(x))
        if self.kind == "breaks":
            torch._dynamo.graph_break()
            x = x * self.linear.weight.mean()
        output: torch.Tensor = x + self.mlp(x) * scale
        return output


class Stack(nn.Module):
    """Blocks that get a parameter of the model as an argument."""

    def __init__(self, kind: str = "", *, direct: bool = False) -> None:
        super().__init__()
        self.direct = direct
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(kind, self.first) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (block.forward if self.direct else block)(x, self.scale)
        return x.float().square().mean()


def lengths(seed: int) -> tuple[torch.Tensor, ...]:
    """Batches of several sizes."""
    return (torch.randn(2 + seed, WIDTH, generator=torch.Generator().manual_seed(seed)),)


@pytest.mark.parametrize("kind", ["tied", "shared", "breaks"])
def test_parity_of_blocks_that_share_parameters_or_break_their_graph(kind: str, tmp_path: Path) -> None:
    case, reference = compiled_case(lambda: Stack(kind), train(models.vectors))
    case.check(case.smallest(tmp_path, **COMPILED, debug=True))
    assert num_graphs() == reference


def test_parity_with_batches_of_several_sizes(tmp_path: Path) -> None:
    case, reference = compiled_case(Stack, train(lengths))
    case.check(case.half(tmp_path, **COMPILED, debug=True))
    assert num_graphs() == reference


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., infinity.Engine]]:
    engines: list[infinity.Engine] = []

    def make(model: nn.Module, **fields: Any) -> infinity.Engine:
        config = Config(**{**ENOUGH, **COMPILED, "nvme": tmp_path, **fields})
        engines.append(infinity.initialize(model, adam(model), config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", ["reads", "calls"])
def test_a_block_that_uses_what_is_not_its_own_is_refused(kind: str, make_engine: Any) -> None:
    engine = make_engine(Stack(kind))
    with pytest.raises(ModelError, match=r"parameters of their own modules only: register others in them"):
        engine(*models.vectors(0))


def test_forward_past_the_hooks_is_refused(make_engine: Any) -> None:
    engine = make_engine(Stack(direct=True))
    with pytest.raises(ModelError, match=r"block blocks\.0: its forward\(\) was called past.*block\(x\) and not"):
        engine(*models.vectors(0))


def test_after_an_exception_in_a_compiled_block_training_goes_on(make_engine: Any) -> None:
    losses = []
    for fails in (False, True):
        start_afresh()
        torch.manual_seed(0)
        engine = make_engine(Stack("raises"), debug=True)
        for step in range(2):
            if fails:
                with pytest.raises(ValueError, match="one is too few"):
                    engine(models.vectors(0)[0][:1])
            loss = engine(*models.vectors(step))
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
        engine.close()
    assert torch.equal(*losses)


def test_hooks_of_users_run_and_parts_of_a_block_work_by_themselves(make_engine: Any) -> None:
    torch.manual_seed(0)
    model = Stack()
    block: Any = model.blocks[0]
    expected = block.mlp(block.linear(*models.vectors(0)) * 2)
    seen = []
    engine = make_engine(model)
    block.register_forward_hook(lambda module, args, output: seen.append("block"))
    with torch.no_grad():
        before = engine(*models.vectors(0))
        block.linear.register_forward_hook(lambda module, args, output: output * 2)
        start_afresh()  # dynamo does not look at hooks again
        after = engine(*models.vectors(0))
    assert seen == ["block", "block"]
    assert not torch.equal(before, after)
    assert torch.equal(block.mlp(block.linear(*models.vectors(0))), expected)


def test_what_is_compiled_does_not_depend_on_budgets(tmp_path: Path) -> None:
    class Wide(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH)) for _ in range(2)))

    little = {**ENOUGH, "hbm": 300 << 10, "nvme": tmp_path}
    model = Wide()
    with infinity.initialize(model, adam(model), Config(**little)) as engine:
        assert "0" not in engine.unit_names  # a block is larger than hbm, and is opened
    model = Wide()
    with pytest.raises(BudgetError, match=r"hbm=300KiB, but units in use at the same time need .* \(0 "):
        infinity.initialize(model, adam(model), Config(**little, **COMPILED))


def test_close_gives_blocks_their_own_forward_again_and_nothing_stays(make_engine: Any) -> None:
    model = Stack()
    own = model.blocks[1].forward
    model.blocks[1].forward = own  # as other libraries leave theirs
    engine = make_engine(model)
    assert all("forward" in vars(block) for block in model.blocks)
    engine.backward(engine(*models.vectors(0)))
    engine.close()
    assert ["forward" in vars(block) for block in model.blocks] == [False, True, False]
    assert model.blocks[1].forward is own
    forgotten = weakref.ref(model.blocks[0])
    del model, own, engine
    make_engine.__closure__[0].cell_contents.clear()
    gc.collect()
    assert forgotten() is None


def start(model: nn.Module | None = None, **fields: Any) -> None:
    model = model or GPT()
    with infinity.initialize(model, adam(model), Config(**{**ENOUGH, "compile": True, **fields})):
        pass


def test_what_cannot_be_compiled_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no backend 'indoctor'; expected one such as .*inductor.*aot_eager"):
        start(compile_backend="indoctor")
    with pytest.raises(ConfigError, match=r"'cudagraphs' records the addresses"):
        start(compile_backend="cudagraphs")
    with pytest.raises(ConfigError, match=r"compile: expected a model with repeated blocks .* found none in MLP"):
        start(models.MLP(), compile_backend="aot_eager")
    for name in ("freezing", "triton.cudagraphs"):
        with inductor.patch({name: True}), pytest.raises(ConfigError, match=rf"_inductor\.config\.{name} is on"):
            start()
    no_compiler = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.raises(ConfigError, match=r"needs a C\+\+ compiler.*apt install g\+\+\); or use .*'aot_"):
        start()
    with monkeypatch.context() as patch:
        patch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
        patch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
        with pytest.raises(ConfigError, match=r"needs Python's headers.*no Python\.h in /nowhere.*python3-dev"):
            start()
    assert num_graphs() == 0


def compiler() -> str | None:
    try:
        return cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return None


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on PATH or in CXX for torch's inductor")
@pytest.mark.parametrize("precision", ["bf16"])
def test_parity_of_generated_kernels(precision: str, tmp_path: Path) -> None:
    """Dropout included: inductor draws random numbers of its own."""
    case, reference = compiled_case(lambda: GPT(models.non_reentrant), train(models.tokens), precision, "inductor")
    case.check(case.smallest(tmp_path, compile=True, debug=True))
    assert num_graphs() == reference
