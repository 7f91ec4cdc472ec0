"""What users do to whole models, done to one under the engine: it works as in PyTorch, or one error says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import prune

import infinity
import parity_models as models
from accidents import two_groups
from infinity import Config, Engine, EngineStateError, ModelError
from parity import ENOUGH, assert_same, build
from parity_models import GPT, WIDTH


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model, optimizer = build(GPT, two_groups)
    with infinity.initialize(model.eval(), optimizer, Config(**ENOUGH, nvme=tmp_path)) as engine:
        yield engine


def expected_loss() -> torch.Tensor:
    model, _ = build(GPT, two_groups)
    return model.eval()(*models.tokens(0))  # type: ignore[no-any-return]


def goes_on(engine: Engine) -> None:
    """The engine is as if nothing had been."""
    loss = engine(*models.tokens(0))
    assert_same(loss.detach(), expected_loss().detach(), "loss")
    engine.backward(loss)
    engine.step()


def pickled(value: object) -> bytes:
    return pickle.dumps(value)


def compiled(model: nn.Module, **options: Any) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="eager", **options)(*models.tokens(0))


def compiled_in_place(model: nn.Module, part: str) -> None:
    torch._dynamo.reset()
    module = model.get_submodule(part)
    module.compile(backend="eager")
    try:
        model(*models.tokens(0))
    finally:
        module._compiled_call_impl = None


def forward_mode(module: nn.Module) -> None:
    with forward_ad.dual_level():
        module(forward_ad.make_dual(X, X))


X = torch.ones(1, 3, WIDTH)
REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "deepcopy": (copy.deepcopy, r"deepcopy\(\) of a GPT.*tokens\.weight.*take the values from engine\.state_dict\(\)"),
    "deepcopy of a part": (lambda m: copy.deepcopy(m.blocks[0].mlp), r"of a Sequential .*blocks\.0\.mlp\.0\.weight"),
    "deepcopy in a list": (lambda m: copy.deepcopy([m]), r"deepcopy\(\) of a GPT"),
    "copy": (copy.copy, r"copying or pickling .* of a GPT.*tokens\.weight"),
    "pickle": (pickled, r"copying or pickling .* of a GPT.*tokens\.weight"),
    "save": (lambda m: torch.save({"model": m}, io.BytesIO()), r"torch\.save\(\)\) of a GPT.*tokens\.weight"),
    "average": (torch.optim.swa_utils.AveragedModel, r"of a GPT.*engine\.state_dict\(\)"),
    "script": (torch.jit.script, r"torch\.jit\.script\(\) of a GPT.*tokens\.weight"),
    "trace": (lambda m: torch.jit.trace(m, models.tokens(0)), r"torch\.jit\.trace.*trace a model of your own"),
    "compile": (compiled, r"torch\.compile and torch\.export .* are not supported.*call the model itself"),
    "compile in place": (lambda m: compiled_in_place(m, ""), r"torch\.compile and torch\.export"),
    "compile a block": (lambda m: compiled_in_place(m, "blocks.0"), r"torch\.compile and torch\.export"),
    "export": (lambda m: torch.export.export(m, models.tokens(0), strict=False), r"torch\.compile and torch\.export"),
    "func.grad": (lambda m: torch.func.grad(lambda x: m.norm(x).sum())(X), r"torch\.func\.grad, .*use loss\.backward"),
    "jvp": (lambda m: torch.func.jvp(m.blocks[0], (X,), (X,)), r"jvp, .*of a model under the engine"),
    "jacrev in vmap": (lambda m: torch.vmap(torch.func.jacrev(m.norm))(X), r"jacrev, .*of a model under the engine"),
    "forward mode": (lambda m: forward_mode(m.blocks[0]), r"forward-mode differentiation .*use loss\.backward"),
    "replicate": (lambda m: m._replicate_for_data_parallel(), r"nn\.DataParallel of a GPT"),
    "half": (lambda m: m.half(), r"converting a GPT.*parameter tokens\.weight.*Config\(device=…, precision=…\)"),
    "double": (lambda m: m.double(), r"converting a GPT.*parameter tokens\.weight"),
    "dtype": (lambda m: m.blocks.to(torch.bfloat16), r"converting a ModuleList.*parameter blocks\.0\.norm\.weight"),
    "meta": (lambda m: m.to("meta"), r"converting a GPT"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), r"converting a GPT"),
    "share_memory": (lambda m: m.share_memory(), r"converting a GPT"),
    "load": (
        lambda m: m.load_state_dict({}),
        r"of a GPT.*tokens\.weight.*engine\.load_state_dict\(\), or load before infinity\.init",
    ),
    "load loosely": (lambda m: m.load_state_dict({}, strict=False), r"load_state_dict\(\) of a GPT"),
    "load by assignment": (lambda m: m.load_state_dict({}, assign=True), r"load_state_dict\(\) of a GPT"),
    "load a part": (lambda m: m.blocks[1].load_state_dict({}), r"of a Block under.*blocks\.1\.norm\.weight"),
}
WARNS = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@WARNS
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_parameter_and_the_repair_and_without_harm(name: str, engine: Engine) -> None:
    use, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        use(engine.module)
    goes_on(engine)


def test_a_compiled_forward_without_graph_breaks_says_it_in_dynamos_words(engine: Engine) -> None:
    with pytest.raises(Exception, match=r"torch\.compile and torch\.export of a model under the engine"):
        compiled(engine.module, fullgraph=True)
    goes_on(engine)


def test_channels_last_is_a_conversion_and_a_layout_that_is_there_already_is_not(tmp_path: Path) -> None:
    for is_there in (False, True):
        model: Any = nn.Sequential(nn.Conv2d(3, 4, 3))
        if is_there:
            model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with infinity.initialize(model, optimizer, Config(**ENOUGH, nvme=tmp_path)) as engine:
            if is_there:
                model.to(memory_format=torch.channels_last)
            else:
                with pytest.raises(ModelError, match=r"converting a Sequential.*parameter 0\.weight"):
                    model.to(memory_format=torch.channels_last)
                model.to(memory_format=torch.preserve_format)
            engine.backward(engine(torch.ones(1, 3, 5, 5)).sum())
            model.to("cpu")
            engine.step()


ALLOWED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "same device": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "same dtype": lambda model: model.to(torch.float32).float(),
    "DataParallel without accelerators": nn.DataParallel,
    "eval": lambda model: model.train().eval().requires_grad_(True),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_changes_no_parameter_works(name: str, engine: Engine) -> None:
    assert_same(ALLOWED[name](engine.module)(*models.tokens(0)).detach(), expected_loss().detach(), "loss")
    goes_on(engine)


def test_functional_call_computes_with_what_it_is_given(engine: Engine) -> None:
    plain, _ = build(GPT, two_groups)
    state = {name: value.detach().clone() * 1.5 for name, value in plain.named_parameters()}
    for chosen in (list(state), [name for name in state if "blocks.0" in name]):
        losses, gradients = [], []
        for model in (engine.module, plain.eval()):
            given = {name: state[name].clone().requires_grad_() for name in chosen}
            loss = functional_call(model, given, models.tokens(0))
            gradients.append(torch.autograd.grad(loss, list(given.values())))
            losses.append(loss.detach())
        assert_same(losses[0], losses[1], "loss")
        assert_same(gradients[0], gradients[1], "gradients")
    goes_on(engine)


def test_what_differentiates_twice_or_maps_without_wrapping_parameters_works(engine: Engine) -> None:
    norm, plain = engine.module.get_submodule("norm"), build(GPT, two_groups)[0].get_submodule("norm")
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    assert_same(torch.vmap(norm)(x).detach(), torch.vmap(plain)(x).detach(), "vmap")
    for vectorize in (False, True):
        got, expected = (torch.autograd.functional.jacobian(each, x, vectorize=vectorize) for each in (norm, plain))
        assert_same(got, expected, f"jacobian, {vectorize=}")
    goes_on(engine)


def test_an_engine_is_neither_copied_nor_pickled(engine: Engine) -> None:
    for use in (copy.copy, copy.deepcopy, pickled):
        with pytest.raises(ModelError, match=r"an engine cannot be copied or pickled.*engine\.state_dict\(\)"):
            use(engine)
    goes_on(engine)


def compiled_model() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")  # type: ignore[return-value]


def model_with_a_compiled_part() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    return model


def model_with_a_compiled_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].forward = torch.compile(model[1].forward, backend="eager")
    return model


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(2, 2)))


def replicated() -> nn.Module:
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids = [0, 1]  # as where there are two accelerators
    return model


@WARNS
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (compiled_model, r"model OptimizedModule is compiled: .*without torch\.compile\(\) .*Config\(compile=True\)"),
        (model_with_a_compiled_part, r"module 1 is compiled"),
        (model_with_a_compiled_forward, r"module 1 is compiled"),
        (scripted, r"module 0 is TorchScript.*the module that it was made from"),
        (replicated, r"model DataParallel: DataParallel copies or synchronises.*\(\.module\)"),
    ],
)
def test_models_that_are_refused_at_start(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(ModelError, match=message):
        infinity.initialize(model, torch.optim.SGD(model.parameters()), Config(**ENOUGH))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: prune.random_structured(layer, "weight", amount=0.5, dim=0),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
        lambda layer: layer._parameters.pop("weight"),
        lambda layer: delattr(layer, "weight"),
    ],
    ids=["prune", "prune structured", "weight norm", "pop", "delete"],
)
def test_a_managed_parameter_is_not_taken_away(engine: Engine, change: Callable[[nn.Module], object]) -> None:
    layer = next(module for module in engine.module.modules() if isinstance(module, nn.Linear))
    with pytest.raises(ModelError, match=r"'weight' of .+ before infinity.initialize"):
        change(layer)
    goes_on(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.utils.parametrizations.spectral_norm(layer),
        lambda layer: nn.utils.parametrizations.orthogonal(layer),
    ],
    ids=["spectral norm", "orthogonal"],
)
def test_what_writes_to_a_parameter_before_taking_it_away_is_never_silent(
    engine: Engine, change: Callable[[nn.Module], object]
) -> None:
    layer = next(module for module in engine.module.modules() if isinstance(module, nn.Linear))
    with pytest.raises(ModelError, match=r"'weight' of .+ before infinity.initialize"):
        change(layer)
    with pytest.raises(ModelError, match=r"qkv.weight was changed in place"):
        engine(*models.tokens(0))


class _Adapted(nn.Linear):
    """A model with the methods that adapter libraries give one."""

    was_merged = False

    def merge_and_unload(self) -> nn.Linear:
        self.was_merged = True
        return self

    def unload(self) -> nn.Linear:
        return self


class _Cached(nn.Linear):
    def unload(self) -> str:
        return "the user's own"


def test_adapters_are_neither_merged_nor_taken_out_until_the_values_are_back(tmp_path: Path) -> None:
    model = nn.Sequential(_Adapted(2, 2), _Cached(2, 2))
    adapted: Any = model[0]
    with infinity.initialize(model, torch.optim.SGD(model.parameters()), Config(**ENOUGH, nvme=tmp_path)) as engine:
        for change in (adapted.merge_and_unload, adapted.unload):
            with pytest.raises(ModelError, match=r"of a _Adapted under the engine: .*0\.weight.*before infinity\.init"):
                change()
        assert model[1].unload() == "the user's own"  # type: ignore[operator]
        state = dict(engine.state_dict())
    with pytest.raises(EngineStateError, match=r"unload\(\) of a _Adapted: parameter 0\.weight has no value"):
        adapted.unload()
    assert not adapted.was_merged
    model.load_state_dict(state)
    assert adapted.merge_and_unload() is adapted
    assert adapted.was_merged
