"""Deferred initialisation: the values and the RNG state of plain construction, without its memory."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import random
import subprocess
import sys
import textwrap
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from infinity.engine import tape
from infinity.engine.deferred import deferred_init, is_deferred, materialize
from infinity.errors import ModelError
from infinity.io.memory import Heap

PLAIN_META = torch.empty(16, 16, device="meta")
THRESHOLD_BYTES = 512  # small models have deferred and real tensors, as large ones do under the default


@pytest.fixture(autouse=True)
def _leave_global_state() -> Iterator[None]:
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    yield
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: Tensor, expected: Tensor, name: str = "") -> None:
    assert got.device == expected.device, name
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), name
    assert bits(got) == bits(expected), name


def value(tensor: Tensor) -> Tensor:
    return materialize(tensor) if is_deferred(tensor) else tensor


def both(build: Callable[[], Any], *, seed: int = 0) -> tuple[Any, Any]:
    """What ``build`` makes plainly and deferred, from one RNG state, which must also end the same."""
    torch.manual_seed(seed)
    plain = build()
    expected = torch.get_rng_state()
    torch.manual_seed(seed)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        later = build()
    assert torch.equal(torch.get_rng_state(), expected)
    return plain, later


def assert_module_same(build: Callable[[], nn.Module], *, num_deferred: int | None = None) -> nn.Module:
    """Build plainly and deferred, and compare everything, materializing in random order, twice."""
    plain, later = both(build)
    expected = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers(remove_duplicate=False))
    got = dict(later.named_parameters(remove_duplicate=False)) | dict(later.named_buffers(remove_duplicate=False))
    assert got.keys() == expected.keys()
    names = sorted(got)
    assert any(is_deferred(tensor) for tensor in got.values())
    if num_deferred is not None:
        assert sum(is_deferred(tensor) for tensor in got.values()) == num_deferred
    state = torch.get_rng_state()
    for seed in range(2):
        random.Random(seed).shuffle(names)
        for name in names:
            assert got[name].requires_grad == expected[name].requires_grad, name
            assert isinstance(got[name], nn.Parameter) == isinstance(expected[name], nn.Parameter), name
            assert_same(value(got[name]), expected[name], name)
    assert torch.equal(torch.get_rng_state(), state), "materialize disturbed the global RNG"
    assert isinstance(later, nn.Module)
    return later


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class GPT(nn.Module):
    def __init__(self, width: int = 16, depth: int = 3, vocabulary: int = 40, length: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))
        self.register_buffer("causal", torch.ones(length, length, dtype=torch.bool).triu(1))
        rates = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        assert rates[-1] == pytest.approx(0.1)
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
            if name.endswith("down.weight"):
                parameter.data.mul_(0.5)
        with torch.no_grad():
            self.position[1:5].normal_(std=0.1)
            self.embedding.weight[3] = 1.5

    def initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def channels_last(module: nn.Module) -> nn.Module:
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def different(tensor: Tensor) -> list[float]:
    return sorted(set(tensor.flatten().tolist()))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(32, 24),
    "gpt": GPT,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(16, 24, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(16, 24),
    "attention": lambda: nn.MultiheadAttention(16, 2),
    "attention, three widths": lambda: nn.MultiheadAttention(16, 2, kdim=24, vdim=20, add_bias_kv=True),
    "embedding": lambda: nn.Embedding(40, 8),
    "embedding, padding": lambda: nn.Embedding(40, 8, padding_idx=3),
    "embedding bag": lambda: nn.EmbeddingBag(40, 8, padding_idx=-1),
    "convolution": lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(256), nn.ConvTranspose2d(16, 8, 3)),
    "bilinear": lambda: nn.Bilinear(8, 8, 8),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(32, 24)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(32, 24)),
    "spectral norm, large vectors": lambda: parametrizations.spectral_norm(nn.Linear(256, 200)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(32, 24)),
    "copy": lambda: copy.deepcopy(nn.Linear(32, 24)),
    "copy of a model": lambda: copy.deepcopy(GPT()),
    "half": lambda: nn.Linear(32, 24).half(),
    "bfloat16": lambda: GPT().bfloat16(),
    "double, made so": lambda: nn.Linear(32, 24, dtype=torch.float64),
    "moved": lambda: nn.Linear(32, 24).to("cpu", torch.float64),
    "no gradient": lambda: nn.Linear(32, 24).requires_grad_(False),
    "channels last": lambda: channels_last(nn.Conv2d(8, 16, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_bitwise_those_of_plain_construction(name: str) -> None:
    assert_module_same(MODULES[name])


INITS: dict[str, Callable[[Tensor], object]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal, rejects": partial(nn.init.trunc_normal_, a=-1, b=1),
    "trunc_normal, narrow": partial(nn.init.trunc_normal_, a=-0.1, b=0.1),
    "trunc_normal, tail": partial(nn.init.trunc_normal_, a=1.5, b=3.0),
    "constant": partial(nn.init.constant_, val=0.3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": partial(nn.init.sparse_, sparsity=0.3),
}


@pytest.mark.parametrize("name", INITS)
def test_every_initialiser(name: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 32))
        for module in model:
            if isinstance(module, nn.Linear):
                INITS[name](module.weight)
        return model

    assert_module_same(build, num_deferred=2)


def test_dirac() -> None:
    def build() -> nn.Module:
        model = nn.Conv2d(8, 16, 3)
        nn.init.dirac_(model.weight, groups=2)
        return model

    assert_module_same(build)


def test_tied_weights_are_one_parameter() -> None:
    model = assert_module_same(GPT)
    assert isinstance(model, GPT)
    assert model.head.weight is model.embedding.weight


# One operator of a random program: it gets the pool of tensors, two of them, and a number.
Step = Callable[[list[Tensor], Tensor, Tensor, int], None]
ROWS = 12  # all tensors are (12, 12) float32, so any two go together: 576 bytes, above the threshold


def push(make: Callable[[Tensor, Tensor, int], Tensor]) -> Step:
    return lambda pool, a, b, n: pool.append(make(a, b, n))


def change(make: Callable[[Tensor, Tensor, int], object]) -> Step:
    return lambda pool, a, b, n: (make(a, b, n), None)[1]


def reject(a: Tensor, b: Tensor, n: int) -> None:
    """A data-dependent loop, like rejection sampling."""
    a.uniform_()
    for _ in range(4):
        mask = a > 0.9
        if not mask.any():
            break
        a.copy_(torch.where(mask, torch.empty_like(a).uniform_(), a))


def assign_masked(a: Tensor, b: Tensor, n: int) -> None:
    a[b > 0] = float(n)


def assign_rows(a: Tensor, b: Tensor, n: int) -> None:
    a[[n, 1]] = b[torch.tensor([0, n])]


NUM_ALIASING = 2
STEPS: list[Step] = [
    push(lambda a, b, n: a.t()),
    push(lambda a, b, n: a.detach()),
    push(lambda a, b, n: torch.zeros(ROWS, ROWS)),
    push(lambda a, b, n: torch.randn(ROWS, ROWS)),
    push(lambda a, b, n: torch.randperm(ROWS * ROWS).view(ROWS, ROWS) / 7),
    push(lambda a, b, n: a.clone()),
    push(lambda a, b, n: torch.empty_like(a).normal_()),
    push(lambda a, b, n: torch.rand_like(a)),
    push(lambda a, b, n: torch.where(a > 0, b, 0.5)),
    push(lambda a, b, n: torch.cat([a[:n], b[n:]])),
    push(lambda a, b, n: a @ b.clamp(-1, 1)),
    push(lambda a, b, n: torch.sort(a, dim=1).values),
    push(lambda a, b, n: a.half().float()),
    push(lambda a, b, n: torch.bernoulli(a.clamp(0, 1))),
    push(lambda a, b, n: torch.outer(torch.arange(ROWS) / 3, torch.ones(ROWS))),
    change(lambda a, b, n: a.normal_()),
    change(lambda a, b, n: a[n].uniform_()),
    change(lambda a, b, n: a[:, 1:n].normal_()),
    change(lambda a, b, n: a.zero_()),
    change(lambda a, b, n: a[n:].fill_(n)),
    change(lambda a, b, n: a.mul_(0.5)),
    change(lambda a, b, n: a.add_(b, alpha=0.25)),
    change(lambda a, b, n: a.copy_(b)),
    change(lambda a, b, n: a[0].copy_(b[n])),
    change(lambda a, b, n: a.masked_fill_(b > 0, 0.125)),
    change(lambda a, b, n: a.tril_()),
    change(lambda a, b, n: a.sub_(a.mean())),
    change(lambda a, b, n: a.bernoulli_(b.clamp(0, 1))),
    change(lambda a, b, n: a.mul_(2.0 if bool(b.sum() > 0) else 3.0)),
    change(lambda a, b, n: a[n].fill_(b.flatten()[n].item())),
    change(lambda a, b, n: a.index_put_((torch.tensor([0, n]),), b[:2], accumulate=True)),
    change(reject),
    change(assign_masked),
    change(assign_rows),
]


def run_program(program: list[tuple[int, int, int, int]]) -> list[Tensor]:
    pool = [torch.ones(ROWS, ROWS), torch.empty(ROWS, ROWS).uniform_(-1, 1)]
    sources = [0, 1]  # which tensor's memory each one is on
    for step, first, second, n in program:
        first, second = first % len(pool), second % len(pool)
        a, b = pool[first], pool[second]
        if sources[first] == sources[second]:
            b = b.clone()  # PyTorch refuses operators whose result partly overlaps what they read
        STEPS[step](pool, a, b, n)
        if len(pool) > len(sources):
            sources.append(sources[first] if step < NUM_ALIASING else len(sources))
    return pool


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    program=st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 7), st.integers(0, 7), st.integers(2, ROWS - 1)),
        max_size=25,
    ),
    order=st.randoms(use_true_random=False),
)
def test_any_program_of_operators(program: list[tuple[int, int, int, int]], order: random.Random) -> None:
    def build() -> list[Tensor]:
        return [tensor.clone() if tensor._is_view() else tensor for tensor in run_program(program)]

    plain, later = both(build)
    pairs = list(zip(later, plain, strict=True))
    order.shuffle(pairs)
    for got, expected in pairs:
        assert is_deferred(got)
        assert_same(materialize(got), expected)


@pytest.mark.parametrize("step", range(len(STEPS)))
def test_each_operator_of_the_random_programs(step: int) -> None:
    plain, later = both(lambda: run_program([(1, 0, 0, 2), (step, 1, 2, 3), (step, 2, 0, 5)]))
    for got, expected in zip(later, plain, strict=True):
        assert_same(materialize(got), expected)


def test_inputs_are_read_as_they_were_then() -> None:
    def build() -> tuple[Tensor, ...]:
        first, second = torch.randn(16, 16), torch.zeros(16, 16)
        second.copy_(first)
        first.normal_()
        small = torch.arange(16.0)
        scaled = second * small
        small.fill_(9)
        return first, second, scaled

    plain, later = both(build)
    for got, expected in zip(later, plain, strict=True):
        assert_same(materialize(got), expected)


def test_looks_at_the_past_and_the_present_together() -> None:
    def build() -> tuple[float, float]:
        tensor = torch.rand(16, 16)
        past = tensor.clone()
        tensor.mul_(2)
        return tensor.sum().item(), (past + tensor).sum().item()

    plain, later = both(build)
    assert later == plain


def test_overwritten_work_is_neither_replayed_nor_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        first = torch.randn(64, 64)
        layer = nn.Linear(32, 32)
        layer.weight.data.copy_(first[:32, :32])
        nn.init.normal_(layer.weight)
    calls = count_runs(monkeypatch)
    materialize(layer.weight)
    assert calls == {"aten.normal_.default": 1}


def count_runs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the operators that really run, by name."""
    calls: Counter[str] = Counter()
    run = tape.Bench.run

    def counting(self: Any, op: Any, **options: Any) -> Any:
        calls[str(op.func)] += 1
        return run(self, op, **options)

    monkeypatch.setattr(tape.Bench, "run", counting)
    return calls


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_rejection_loop_draws_each_sample_twice_not_once_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Tensor:
        return nn.init.trunc_normal_(torch.empty(64, 64), a=-1, b=1)

    torch.manual_seed(0)
    with CountCalls() as plain:
        build()
    num_turns = plain.calls["aten.normal_.default"]
    if not num_turns:
        pytest.skip("this PyTorch's trunc_normal_ does not draw in a loop")
    assert num_turns > 4
    calls = count_runs(monkeypatch)
    torch.manual_seed(0)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        build()
    assert calls["aten.normal_.default"] <= 2 * num_turns


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: torch.randn(16, 16, generator=generator),
        lambda generator: torch.rand(16, 16, generator=generator),
        lambda generator: torch.randint(9, (16, 16), generator=generator),
        lambda generator: torch.randint(3, 9, (16, 16), generator=generator),
        lambda generator: torch.randperm(256, generator=generator),
        lambda generator: torch.normal(0.0, 1.0, (16, 16), generator=generator),
        lambda generator: torch.poisson(torch.full((16, 16), 3.0), generator=generator),
        lambda generator: torch.empty(16, 16).exponential_(generator=generator),
        lambda generator: torch.multinomial(torch.ones(256), 256, generator=generator),
        lambda generator: torch.zeros(256) if generator else F.dropout(torch.ones(16, 16)),
        lambda generator: torch.zeros(256) if generator else torch.native_dropout(torch.ones(16, 16), 0.5, True)[0],
        lambda generator: torch.randn(16, 16, dtype=torch.complex64, generator=generator).conj() * 1j,
    ],
)
@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
def test_random_factories(make: Callable[[torch.Generator | None], Tensor], own: bool) -> None:
    states = []

    def build() -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3) if own else None
        first, small, second = make(generator), torch.rand(3, generator=generator), make(generator).zero_()
        second.view(-1)[: first.numel() // 2] = first.view(-1)[: first.numel() // 2]
        if generator is not None:
            states.append(generator.get_state())
        return first, small, second

    plain, later = both(build)
    assert is_deferred(later[0])
    assert not is_deferred(later[1])
    state = torch.get_rng_state()
    for got, expected in zip(later, plain, strict=True):
        assert_same(
            torch.view_as_real(value(got).resolve_conj()) if got.is_complex() else value(got),
            torch.view_as_real(expected.resolve_conj()) if expected.is_complex() else expected,
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert not own or torch.equal(*states)


def test_looking_at_values_makes_them() -> None:
    def build() -> dict[str, Any]:
        tensor = torch.arange(256.0).view(16, 16)
        real = torch.zeros(4)
        real.copy_(tensor[1, :4])
        small = torch.zeros(())
        torch.sum(tensor, dim=(0, 1), out=small)
        return {
            "item": tensor[3, 4].item(),
            "bool": bool((tensor > 3).any()),
            "float": float(tensor.mean()),
            "list": tensor[2].tolist(),
            "numpy": tensor.numpy().copy().tolist(),
            "asarray": numpy.asarray(tensor[:2]).tolist(),
            "equal": torch.equal(tensor, tensor.clone()),
            "allclose": torch.allclose(tensor, tensor + 1),
            "nonzero": (tensor > 250).nonzero().tolist(),
            "masked": tensor[tensor > 250].tolist(),
            "unique": torch.unique(tensor % 3).tolist(),
            "into real": real.tolist(),
            "out": small.item(),
            "iterate": [float(row[0]) for row in tensor[:3]],
            "meta": (tensor.is_meta, tensor.is_cpu, tensor.device),
            "new": (tensor.new_tensor([1, 2]).tolist(), tensor.new([3.0]).tolist(), tensor.new_zeros(2).tolist()),
            "sparse": (tensor > 250).to_sparse().values().tolist(),
            "index": tensor[[1, 2], [0, 3]].tolist(),
        }

    plain, later = both(build)
    assert later == plain


def test_a_large_result_of_a_shape_that_depends_on_values_is_deferred_too() -> None:
    plain, later = both(lambda: torch.randn(32, 32)[torch.randn(32) > 0])
    assert is_deferred(later)
    assert_same(materialize(later), plain)


def test_numpy_is_read_only_because_writes_would_be_lost() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        array = torch.zeros(16, 16).numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_views_have_their_geometry_and_only_their_own_memory() -> None:
    def build() -> tuple[Tensor, ...]:
        whole = torch.randn(32, 16)
        pair = whole.view(torch.int32), torch.view_as_complex(whole.view(32, 8, 2))
        return whole[4:8], whole.t(), whole[:, 3], whole[1:2].expand(5, 16), whole[0:0], *pair, whole.mT[2:4, ::3]

    plain, later = both(build)
    for got, expected in zip(later, plain, strict=True):
        assert is_deferred(got)
        made = materialize(got)
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert made.tolist() == expected.tolist()
        made_bytes = made.untyped_storage().nbytes()
        extent = sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True)) + 1
        assert made_bytes == (extent if made.numel() else 0) * made.itemsize


def test_results_are_independent_of_each_other_and_of_the_record() -> None:
    plain, later = both(lambda: torch.randn(16, 16))
    first = materialize(later)
    second = materialize(later)
    first.zero_()
    assert_same(second, plain)
    assert_same(materialize(later), plain)
    assert not first.requires_grad
    assert not first.is_inference()


def test_materialize_minds_neither_grad_nor_inference_nor_autocast_nor_default_device() -> None:
    plain, later = both(lambda: nn.Parameter(torch.randn(16, 16) @ torch.randn(16, 16)))
    for context in (torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta")):
        with context:
            made = materialize(later)
        assert_same(made, plain)
        assert not made.is_inference()


def test_construction_under_inference_mode() -> None:
    def build() -> tuple[Tensor, Tensor, float]:
        with torch.inference_mode():
            product = torch.randn(16, 16) @ torch.randn(16, 16)
            return product, product.double().mul_(2), (product @ product).sum().item()

    (*plain, expected), (*later, got) = both(build)
    assert got == expected
    for made, wanted in zip(later, plain, strict=True):
        assert_same(materialize(made), wanted)


def test_construction_under_autocast() -> None:
    def build() -> nn.Module:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return GPT()

    assert_module_same(build)


def test_gradient_graph_of_construction() -> None:
    def build() -> tuple[Tensor, nn.Parameter]:
        weight = nn.Parameter(torch.randn(16, 16))
        return weight * 2 + 1, weight

    (plain, _), (later, weight) = both(build)
    assert later.requires_grad
    assert later.grad_fn is not None
    assert weight.is_leaf
    assert_same(materialize(later), plain)


def test_default_dtype_is_that_of_construction() -> None:
    def build() -> list[Tensor]:
        torch.set_default_dtype(torch.float64)
        try:
            return [
                *(torch.ones(16, 16), torch.randn(16, 16), torch.full((16, 16), 0.1), torch.linspace(0, 1, 300)),
                *(torch.arange(300) / 7, torch.arange(300).view(20, 15).mul(0.1), nn.Linear(16, 16).weight),
            ]
        finally:
            torch.set_default_dtype(torch.float32)

    plain, later = both(build)
    for got, expected in zip(later, plain, strict=True):
        assert is_deferred(got)
        assert_same(materialize(got), expected)
        assert torch.get_default_dtype() == torch.float32


def test_large_real_tensors_are_read_but_must_not_change() -> None:
    real = torch.randn(16, 16)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        layer = nn.Linear(16, 16)
        layer.load_state_dict({"weight": real, "bias": torch.ones(16)})
        double = real * 2
    assert not real.is_meta
    assert_same(materialize(layer.weight), real)
    assert_same(materialize(double), real * 2)
    assert_same(value(layer.bias), torch.ones(16))
    real.add_(1)
    with pytest.raises(ModelError, match=r"real tensor of shape \(16, 16\).*changed"):
        materialize(layer.weight)


def test_from_numpy_and_literals_stay_real() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        array = torch.from_numpy(numpy.ones((32, 32), numpy.float32))
        literal = torch.tensor([[1.0] * 32] * 32)
    assert not is_deferred(array)
    assert not is_deferred(literal)
    assert array.sum() == literal.sum() == 1024


def test_nested_contexts_and_a_second_context() -> None:
    def build() -> tuple[Tensor, Tensor]:
        with deferred_init(threshold_bytes=THRESHOLD_BYTES) if nested else nullcontext():
            first = torch.randn(16, 16)
            first.mul_(2)
        with deferred_init(threshold_bytes=THRESHOLD_BYTES) if nested else nullcontext():
            return first, first + torch.randn(16, 16)

    nested = False
    plain, _ = both(build)
    nested = True
    _, later = both(build)
    for got, expected in zip(later, plain, strict=True):
        assert_same(materialize(got), expected)


def test_materialize_inside_the_context_sees_the_present() -> None:
    torch.manual_seed(0)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.zeros(16, 16)
        before = materialize(tensor)
        tensor.fill_(2)
        assert is_deferred(tensor)
        after = materialize(tensor)
        assert not is_deferred(after)
    assert different(before) == [0]
    assert different(after) == [2]


def test_small_tensors_are_real_and_the_threshold_is_in_bytes() -> None:
    with deferred_init():
        small, large = torch.empty(16 * 1024 - 1), torch.empty(16 * 1024)
        assert not is_deferred(small)
        assert is_deferred(large)
    assert not is_deferred(torch.empty(16 * 1024))
    assert large.device.type == "meta"


def test_device_meta_inside_means_deferred() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.full((3,), 2.0, device="meta")
    assert materialize(tensor).tolist() == [2.0] * 3


def test_an_exception_inside_ends_the_context() -> None:
    with pytest.raises(ZeroDivisionError), deferred_init(threshold_bytes=THRESHOLD_BYTES):
        torch.empty(1 // 0)
    assert not torch.empty(16, 16).is_meta


def peek(x: Tensor) -> Tensor:
    return x.view(-1)


def bump(x: Tensor) -> Tensor:
    return x.add_(1)


def twice(x: Tensor) -> Tensor:
    return x * 2


def turned(x: Tensor) -> Tensor:
    return x.t().clone()


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """Operators of a user, most without an implementation for meta tensors."""
    with torch.library._scoped_library("infinity_test", "DEF") as library:
        library.define("peek(Tensor(a) x) -> Tensor(a)")
        library.define("bump_(Tensor(a!) x) -> Tensor(a!)")
        library.define("twice(Tensor x) -> Tensor")
        library.define("turned(Tensor x) -> Tensor")
        library.impl("peek", peek, "CPU")
        library.impl("bump_", bump, "CPU")
        library.impl("twice", twice, "CPU")
        library.impl("turned", turned, "CPU")
        library.impl("turned", torch.empty_like, "Meta")  # whose strides are not those of the CPU
        library.define("second(Tensor x, Tensor y) -> Tensor")
        library.impl("second", lambda x, y: y, "CPU")  # not what its schema promises
        library.impl("second", lambda x, y: torch.empty_like(y), "Meta")
        yield torch.ops.infinity_test


def test_operators_without_meta_implementation_run_for_their_shapes(operators: Any) -> None:
    def build() -> list[Tensor]:
        tensor = torch.randn(16, 16)
        operators.bump_(tensor)
        operators.bump_(tensor[1:3])
        doubled = operators.twice(tensor)
        tensor.mul_(0.5)
        assert operators.bump_(tensor) is tensor
        return [tensor, doubled, operators.turned(tensor).contiguous()]

    plain, later = both(build)
    for got, expected in zip(later, plain, strict=True):
        assert is_deferred(got)
        assert_same(materialize(got), expected)


def test_results_are_independent_of_the_record_whatever_operators_return(operators: Any) -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = operators.second(torch.zeros(16, 16), torch.ones(4))
    materialize(tensor).zero_()
    assert materialize(tensor).tolist() == [1] * 4


def test_views_without_meta_implementation_are_refused(operators: Any) -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.zeros(16, 16)
        with pytest.raises(ModelError, match=r"infinity_test.peek.*is a view"):
            operators.peek(tensor)


# --- refusals


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.empty(3)], ids=["plain meta", "real"])
def test_tensors_without_a_record_are_refused(tensor: Tensor) -> None:
    assert not is_deferred(tensor)
    with pytest.raises(ModelError, match=r"deferred_init\(\) instead of torch.device" if tensor.is_meta else "real"):
        materialize(tensor)


def test_a_model_built_under_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(32, 32)
    with pytest.raises(ModelError, match=r"plain meta tensor of shape \(32, 32\)"):
        materialize(model.weight)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda weight: nn.init.normal_(weight), "changed in place after"),
        (lambda weight: weight.detach().zero_(), "changed in place after"),
        (lambda weight: weight.untyped_storage().resize_(0), "resized"),
    ],
)
@pytest.mark.parametrize("build", [lambda: nn.Linear(32, 24), lambda: nn.Linear(32, 24).bfloat16()])
def test_changes_after_the_context_are_refused(
    build: Callable[[], nn.Linear], act: Callable[[Tensor], object], match: str
) -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        model = build()
    materialize(model.weight)
    act(model.weight)
    with pytest.raises(ModelError, match=match):
        materialize(model.weight)


def test_conversion_after_the_context_has_no_record() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        model = nn.Linear(32, 24)
    model.half()
    with pytest.raises(ModelError, match="initialise and convert it inside"):
        materialize(model.weight)


def under_autocast(act: Callable[[], object]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        act()


def set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda t: t.data_ptr(), r"data_ptr\(\) needs the memory"),
        (lambda t: t.share_memory_(), r"share_memory_\(\) needs the memory"),
        (lambda t: torch.save({"weight": t}, io.BytesIO()), r"storage\(\) needs the memory"),
        (lambda t: pickle.dumps(nn.Parameter(t)), r"storage\(\) needs the memory"),
        (lambda t: under_autocast(lambda: t @ t), "aten.mm.default.*autocast"),
        (lambda t: t.resize_(64, 64), r"aten.resize_.*changes the storage"),
        (lambda t: t + FakeTensorMode().from_tensor(torch.ones(16)), r"aten.add.Tensor.*FakeTensor"),
        (lambda t: t + PLAIN_META, r"aten.add.Tensor.*plain meta"),
        (lambda t: set_data(t, torch.from_numpy(numpy.ones((16, 16), numpy.float32))), "a real tensor"),
        (lambda t: set_data(torch.ones(3), t), "the deferred tensor"),
        (lambda t: t.set_(torch.ones(3)), r"aten.set_.*memory of a real one"),
        (lambda t: torch._foreach_copy_([t, torch.ones(3)], [t + 1, torch.ones(3)]), "real and deferred"),
    ],
)
def test_what_cannot_be_recorded_is_refused(act: Callable[[Tensor], object], match: str) -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.zeros(16, 16)
        with pytest.raises(ModelError, match=match):
            act(tensor)


def test_communication_is_refused() -> None:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with deferred_init(threshold_bytes=THRESHOLD_BYTES):
            tensor = torch.zeros(16, 16)
            with pytest.raises(ModelError, match=r"c10d.broadcast_.*other ranks"):
                distributed.broadcast(tensor, 0)
    finally:
        distributed.destroy_process_group()


def test_wrong_calls_raise_what_pytorch_raises() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.zeros(16, 16)
        acts: list[Callable[[], Tensor]] = [
            lambda: tensor @ torch.zeros(3, 3),
            lambda: tensor.copy_(torch.zeros(5)),
            lambda: tensor.view(7),
        ]
        for act in acts:
            with pytest.raises(RuntimeError, match=r"shape|size") as caught:
                act()
            assert not isinstance(caught.value, ModelError)
        tensor.fill_(1)
    assert materialize(tensor).sum() == 256


# --- memory and ownership


def test_swapping_a_parameter_frees_its_record() -> None:
    source = torch.randn(16, 16)
    reference = weakref.ref(source)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        model = nn.Linear(16, 16)
        model.weight.data.copy_(source)
    expected = source.clone()
    del source
    gc.collect()
    assert reference() is not None
    real = nn.Parameter(materialize(model.weight))
    torch.utils.swap_tensors(model.weight, real)
    del real
    assert reference() is None
    assert_same(model.weight.data, expected)
    (gradient,) = torch.autograd.grad(F.linear(torch.ones(2, 16), model.weight).sum(), model.weight)
    assert different(gradient) == [2]


def test_a_copy_keeps_the_record_of_its_source_only_as_long_as_itself() -> None:
    source = torch.randn(16, 16)
    reference = weakref.ref(source)
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        first = torch.zeros(16, 16).copy_(source)
        second = first.clone()
    expected = source.clone()
    del source, first
    assert_same(materialize(second), expected)
    del second
    assert reference() is None


def test_long_chains_need_no_recursion() -> None:
    with deferred_init(threshold_bytes=THRESHOLD_BYTES):
        tensor = torch.zeros(16, 16)
        for _ in range(3000):
            tensor.add_(1)
    assert different(materialize(tensor)) == [3000]
    del tensor


MEMORY = """
    import sys
    import torch
    from torch import nn
    from infinity.engine.deferred import deferred_init, is_deferred, materialize

    def peak_bytes():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

    def build(width):
        return [make(width) for _ in range(16)]

    torch.set_num_threads(1)
    make, width = eval(sys.argv[1]), int(sys.argv[2])
    with deferred_init():
        for weight in build(width // 8):
            materialize(weight)
    warm = peak_bytes()
    with deferred_init():
        weights = build(width)
    built = peak_bytes()
    for weight in weights:
        materialize(weight)
    made = peak_bytes()
    weights = build(width)
    print(built - warm, made - warm, peak_bytes() - warm)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak memory that Linux reports")
@pytest.mark.parametrize(
    ("make", "width", "num_tensors"),
    [
        ("lambda width: nn.Linear(width, width).weight", 2048, 1),
        ("lambda width: nn.Parameter(torch.randn(width, width))", 2048, 1),
        # Its loop reads the tensor, three masks and the next sample.
        ("lambda width: nn.init.trunc_normal_(torch.empty(width, width), a=-2.0, b=2.0)", 1024, 4),
    ],
    ids=["linear", "randn", "trunc_normal"],
)
def test_memory_is_that_of_one_tensor_at_a_time(make: str, width: int, num_tensors: int) -> None:
    tensor_bytes, slack_bytes = width * width * 4, 6 << 20
    heap_bytes = Heap.TRIM_BYTES if tensor_bytes < Heap.TRIM_BYTES else 0  # freed, not returned yet
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), make, str(width)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    built_bytes, made_bytes, plain_bytes = map(int, run.stdout.split())
    assert plain_bytes > 12 * tensor_bytes, "the measure itself"
    allowed_bytes = num_tensors * tensor_bytes + heap_bytes + slack_bytes
    assert built_bytes <= allowed_bytes < plain_bytes
    assert made_bytes <= allowed_bytes
