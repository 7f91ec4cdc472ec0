"""Adapters of PEFT under the engine: the bits of plain PyTorch, with a base that is only read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Config, Engine, ModelError, StorageError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from infinity.integrations.peft import export_merged, load_adapters, save_adapters  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::DeprecationWarning")

VOCABULARY = 97
SMALL = {"device": "cpu", "precision": "fp32", "hbm": "400KiB", "ram": "250KiB"}
QV = ["q_proj", "v_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "dropout": {"target_modules": QV, "lora_dropout": 0.1},
    "all linear": {"target_modules": "all-linear"},
    "bias": {"target_modules": QV, "bias": "lora_only"},
    "head": {"target_modules": QV, "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": QV, "use_dora": True, "lora_dropout": 0.1},
    "rslora": {"target_modules": QV, "use_rslora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


def make_base(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    fields = {"vocab_size": VOCABULARY, "attention_bias": True, **sizes, **heads, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))


def adapt(base: Any, **kind: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **kind))
    torch.manual_seed(2)
    return model


def two_adapters() -> Any:
    model = adapt(make_base(), target_modules=QV, lora_dropout=0.1)
    other = peft.LoraConfig(r=2, target_modules=["k_proj", "q_proj"], lora_dropout=0.2, task_type="CAUSAL_LM")
    model.add_adapter("other", other)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in model.named_parameters() if p.requires_grad or "lora_" in n], lr=1e-2)


def engine_of(model: Any, path: Path, **changes: Any) -> Engine:
    path.mkdir(exist_ok=True)
    return infinity.initialize(model, adamw(model), Config(**{**SMALL, "nvme": path, **changes}))


class Plain:
    """What an engine is to ``train``, in plain PyTorch."""

    def __init__(self, model: Any) -> None:
        self.module, self._optimizer = model, adamw(model)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def train(trained: Any, num_steps: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    trained.module.train()
    losses = []
    for seed in range(num_steps):
        tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = trained.module(input_ids=tokens, labels=tokens).loss
        trained.backward(loss)
        trained.step()
        losses.append(loss.detach().clone())
    return losses


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    model.eval()
    logits: torch.Tensor = model(input_ids=torch.arange(16)[None]).logits
    return logits.clone()


def assert_same_state(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_trains_saves_and_merges_with_the_bits_of_plain_peft(kind: str, tmp_path: Path) -> None:
    plain = Plain(adapt(make_base(), **KINDS[kind]))
    expected = train(plain, 2)
    with engine_of(adapt(make_base(), **KINDS[kind]), tmp_path / "nvme") as engine:
        assert all(map(torch.equal, train(engine, 2), expected))
        trained = dict(engine.state_dict())
        assert_same_state(trained, plain.module.state_dict())
        save_adapters(engine, tmp_path / "adapters")
        export_merged(engine, tmp_path / "merged", max_file_bytes=200_000)
        assert_same_state(engine.state_dict(), trained)  # neither has changed anything
        assert torch.equal(train(engine, 1)[0], train(plain, 1)[0])
        load_adapters(engine, tmp_path / "adapters")
        assert_same_state(engine.state_dict(), trained)
        result = outputs(engine.module)
    loaded = peft.PeftModel.from_pretrained(make_base(), tmp_path / "adapters")
    assert torch.equal(outputs(loaded), result)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_state(merged.state_dict(), loaded.merge_and_unload().state_dict())
    assert (tmp_path / "merged/model.safetensors.index.json").exists()
    assert not [each.name for each in (tmp_path / "adapters").iterdir() if each.name.startswith(".")]


def test_the_base_is_read_and_nothing_of_it_is_written_or_has_other_state(tmp_path: Path) -> None:
    model = adapt(make_base(num_hidden_layers=8), target_modules=["q_proj"])
    frozen_bytes = 4 * sum(param.numel() for param in model.parameters() if not param.requires_grad)
    with engine_of(model, tmp_path) as engine:
        usage = engine.usage()
        assert usage["device"].budget_bytes + usage["host"].budget_bytes < frozen_bytes / 1.5
        parts = engine._plan.whole_parts
        trained = [part for part in parts if any(slot.param.requires_grad for slot in part.slots)]
        assert all(slot.param.requires_grad for part in trained for slot in part.slots)
        trained_bytes = sum(part.num_elements * 4 for part in trained)
        kept = engine.summary().kept
        assert kept["gradients"] == trained_bytes < frozen_bytes / 8
        assert kept["optimizer states"] == 2 * kept["gradients"]
        train(engine, 2)
        step = engine.last_step
        assert step is not None
        written = [unit.moved_bytes.get("nvme_write", {}) for unit in step.units.values()]
        assert sum(each.get("param", 0) for each in written) <= kept["gradients"]
        assert step.units["(rest)"].moved_bytes.keys() == {"nvme_read"}  # embedding, norm, head
        assert step.nvme_read_bytes > frozen_bytes / 2


def test_a_base_that_is_never_whole_in_memory(tmp_path: Path) -> None:
    base = make_base()
    base.save_pretrained(tmp_path / "base")
    plain = Plain(adapt(base, target_modules=QV))
    with infinity.deferred_init(threshold_bytes=4096):
        deferred = make_base()
        deferred.load_state_dict(infinity.deferred_weights(tmp_path / "base"))
        deferred = adapt(deferred, target_modules=QV)
    assert sum(param.nbytes for param in deferred.parameters() if not param.is_meta) < 32 << 10
    with engine_of(deferred, tmp_path / "nvme") as engine:
        assert all(map(torch.equal, train(engine, 2), train(plain, 2)))
        export_merged(engine, tmp_path / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_state(merged.state_dict(), plain.module.merge_and_unload().state_dict())


def test_adapters_are_switched_and_disabled(tmp_path: Path) -> None:
    def run(trained: Any) -> list[torch.Tensor]:
        model: Any = trained.module
        found = train(trained, 2)
        with model.disable_adapter():
            found.append(outputs(model))
        for active in ("other", "default"):
            model.set_adapter(active)
            found += train(trained, 2)
        return found

    plain = Plain(two_adapters())
    expected = run(plain)
    with engine_of(two_adapters(), tmp_path / "nvme") as engine:
        assert all(map(torch.equal, run(engine), expected))
        assert_same_state(engine.state_dict(), plain.module.state_dict())
        save_adapters(engine, tmp_path / "one", adapters=["other"])
        save_adapters(engine, tmp_path / "all")
        for trained in (engine, plain):
            adapted: Any = trained.module
            adapted.base_model.set_adapter(["default", "other"])
        export_merged(engine, tmp_path / "merged")
        with pytest.raises(ModelError, match=r"no adapter 'third'; this model has 'default', 'other'"):
            save_adapters(engine, tmp_path / "third", adapters=["third"])
    assert sorted(path.parent.name for path in tmp_path.glob("*/**/adapter_model.safetensors")) == [
        "all",
        "other",
        "other",
    ]
    assert torch.equal(expected[2], outputs(make_base()))
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_state(merged.state_dict(), plain.module.merge_and_unload().state_dict())


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", [{"target_modules": ["embed_tokens"]}, KINDS["head"]], ids=["embedding", "head"])
def test_tied_weights_are_merged_as_peft_does(kind: dict[str, Any], tmp_path: Path) -> None:
    with engine_of(adapt(make_base(tie_word_embeddings=True), **kind), tmp_path / "nvme") as engine:
        train(engine, 1)
        export_merged(engine, tmp_path / "merged")
        state = dict(engine.state_dict())
    plain = adapt(make_base(tie_word_embeddings=True), **kind)
    plain.load_state_dict(state)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same_state(merged.state_dict(), plain.merge_and_unload().state_dict())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    path = tmp_path_factory.mktemp("shared")
    with engine_of(two_adapters(), path / "nvme") as engine:
        save_adapters(engine, path / "saved", adapters=["default"])
        yield engine, path / "saved"


CONFIG = peft.LoraConfig(target_modules=["k_proj"])
CHANGES: dict[str, Callable[[Any], object]] = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "unload": lambda model: model.unload(),
    "merge_adapter": lambda model: model.merge_adapter(),
    "unmerge_adapter": lambda model: model.unmerge_adapter(),
    "add_adapter": lambda model: model.add_adapter("new", CONFIG),
    "add_weighted_adapter": lambda model: model.add_weighted_adapter(["default"], [1.0], "new"),
    "delete_adapter": lambda model: model.delete_adapter("other"),
    "load_adapter": lambda model: model.load_adapter("nowhere", "new"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_puts_parameters_in_or_out_is_refused_without_harm(name: str, shared: tuple[Engine, Path]) -> None:
    model = shared[0].module
    before = outputs(model)
    with pytest.raises(ModelError, match=rf"{name}\(\) of a \w+ under the engine.*before infinity.initialize\(\)"):
        CHANGES[name](model)
    assert torch.equal(outputs(model), before)


def test_it_works_again_once_the_engine_is_closed_and_values_are_back(tmp_path: Path) -> None:
    model = adapt(make_base(), target_modules=QV)
    with engine_of(model, tmp_path) as engine:
        train(engine, 1)
        expected, state = outputs(model), dict(engine.state_dict())
    with pytest.raises(infinity.EngineStateError, match="has no value, because the engine that had it is closed"):
        model.merge_and_unload()
    model.load_state_dict(state)
    assert torch.equal(outputs(model), expected)
    assert type(model.merge_and_unload()) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 16}, r"has lora_alpha=16, and that of this model 8"),
        ({"use_rslora": True}, r"has use_rslora=True, and that of this model False"),
        ({"peft_type": "LOHA"}, r"has peft_type='LOHA', and that of this model 'LORA'"),
    ],
)
def test_an_adapter_that_computes_otherwise_is_refused(
    change: dict[str, Any], message: str, shared: tuple[Engine, Path], tmp_path: Path
) -> None:
    engine, saved = shared
    config = json.loads((saved / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        load_adapters(engine, tmp_path)


def test_what_is_no_such_adapter_is_refused(shared: tuple[Engine, Path], tmp_path: Path) -> None:
    engine, saved = shared
    with pytest.raises(StorageError, match=r"adapter_config\.json"):
        load_adapters(engine, tmp_path)
    config = json.loads((saved / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors"):
        load_adapters(engine, tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "adapter_model.safetensors")
    name, value = tensors.popitem()
    save_file({**tensors, "stranger": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=rf"1 tensors are missing, such as {name}; 1 .* such as stranger"):
        load_adapters(engine, tmp_path)
    save_file({**tensors, name: value[:1].clone()}, tmp_path / "adapter_model.safetensors")
    before = outputs(engine.module)
    with pytest.raises(ModelError, match="shape"):
        load_adapters(engine, tmp_path)
    assert torch.equal(outputs(engine.module), before)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    plain = nn.Linear(4, 4)
    with engine_of(plain, tmp_path / "plain") as engine:
        for act in (save_adapters, load_adapters, export_merged):
            with pytest.raises(ModelError, match=rf"{act.__name__}: expected .*get_peft_model\(\), got a Linear"):
                act(engine, tmp_path / "out")
    quantised = adapt(make_base(num_hidden_layers=1), target_modules=QV)
    quantised.get_base_model().quantization_method = "bitsandbytes"
    with (
        engine_of(quantised, tmp_path / "quantised") as engine,
        pytest.raises(ModelError, match=r"is quantised .*bitsandbytes.*without a quantization_config"),
    ):
        export_merged(engine, tmp_path / "out")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    prompted = peft.get_peft_model(make_base(num_hidden_layers=1), prompts)
    with (
        engine_of(prompted, tmp_path / "prompts") as engine,
        pytest.raises(ModelError, match="prompts are no change of weights"),
    ):
        export_merged(engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()
