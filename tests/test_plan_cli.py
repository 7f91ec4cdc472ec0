"""infinity plan: what a person types, sees, and gets as JSON and as a picture."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from infinity import __main__ as command_line

GIVEN = ("--device", "cpu", "--compute-seconds", "0.5", "--optimizer-speed", "1GB/s")
GPT = ("--layers", "2", "--hidden", "64", "--heads", "2")
BEST = {"nvme->host": 2.0, "host->nvme": 1.0, "nvme<->host": 1.5, "host->device": 20.0, "optimizer": 5.0, "memcpy": 9.0}


class Called:
    """What a command said, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON."""
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def called(*flags: object) -> Called:
        with pytest.raises(SystemExit) as ended:
            command_line.main(["plan", *map(str, flags)])
        said = capsys.readouterr()
        return Called(int(ended.value.code or 0), said.out, said.err)

    return called


def test_the_page_fits_into_80_columns_and_says_what_was_asked(call: Any, tmp_path: Path) -> None:
    budgets = ("--nvme", tmp_path, "--hbm", "500kB", "--ram", "700kB", "--read", "3GB/s", "--endurance", "600TBW")
    said = call(*GPT, *GIVEN, *budgets)
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 80
    for words in (
        " parameters", "in memory", "on NVMe", "optimizer states", "needed at least", "NVMe read",
        "predicted step",
        "bottleneck", "disk is hidden from", "ranks needed", "600 TB", "written per day", "speeds: given",
    ):  # fmt: skip
        assert words in said.out, words
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_and_the_page_goes_elsewhere(call: Any, tmp_path: Path) -> None:
    said = call(*GPT, *GIVEN, "--json", "-")
    assert said.code == 0
    document = said.document
    assert "predicted step" in said.err
    assert (document["schema"], document["fits"], document["ranks"]) == (1, True, 1)
    assert document["kept"]["parameters"] >= 4 * document["model"]["params"]
    assert document["step"]["seconds"] > document["step"]["busy_seconds"]["compute"] == 0.5
    assert document["smallest"].keys() == {"hbm", "ram"}
    assert document["placed"]["nvme"] == {}
    file = tmp_path / "plan.json"
    assert call(*GPT, *GIVEN, "--json", file).code == 0
    assert json.loads(file.read_text()) == document


def test_too_small_budgets_end_with_1_and_what_would_do(call: Any) -> None:
    said = call(*GPT, *GIVEN, "--ram", "100kB", "--json", "-")
    assert said.code == 1
    assert said.document["fits"] is False
    assert said.document["short"]["ram"] == said.document["smallest"]["ram"] - 100_000
    assert said.document["ranks_needed"] is None, "a slice of a unit may be small, the unit itself stays as large"
    assert "too little memory" in said.err
    assert call(*GPT, *GIVEN, "--ram", said.document["smallest"]["ram"]).code == 0


def test_the_picture_is_a_png(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    said = call(*GPT, *GIVEN, "--nvme", tmp_path, "--hbm", "500kB", "--ram", "700kB", "--plot", file)
    assert said.code == 0
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1100, 792)


def test_speeds_come_from_a_bench_and_flags_go_before_it(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"best": {route: {"gb_s": {"median": speed}} for route, speed in BEST.items()}}))
    machine = call(*GPT, *GIVEN[:4], "--bench", file, "--write", "4GB/s", "--json", "-").document["machine"]
    assert (machine["read"], machine["mixed"], machine["optimizer"]) == (2e9, 4e9, 5e9)
    assert (machine["write"], machine["to_device"], machine["copy"]) == (4e9, 20e9, 9e9)
    assert machine["source"] == "bench.json and given"


def test_a_class_with_arguments_is_planned(call: Any) -> None:
    kwargs = json.dumps({"d_model": 32, "nhead": 2, "dim_feedforward": 64})
    said = call(*GIVEN, "--model", "torch.nn:TransformerEncoderLayer", "--kwargs", kwargs, "--json", "-")
    assert said.document["model"] == {"name": "torch.nn:TransformerEncoderLayer", "params": 8544}


def test_counts_alone_are_enough(call: Any) -> None:
    flags = ("--parameters", "1e6", "--layers", "4", "--hidden", "64", "--vocab", "256", "--precision", "bf16")
    document = call(*GIVEN, *flags, "--json", "-").document
    assert document["model"]["params"] == pytest.approx(1e6, rel=0.01)


def test_a_hugging_face_config_is_planned_without_weights(call: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["GPT2LMHeadModel"]}))
    for path in (tmp_path, tmp_path / "config.json"):
        document = call(*GIVEN, "--hf", path, "--json", "-").document
        assert document["model"] == {"name": "GPT2LMHeadModel", "params": 128 * 32 + 64 * 32 + 2 * 12704 + 64}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layers", "none"], "--layers"),
        (["--read", "3 parsecs"], "--read: expected bytes per second, such as 3GB/s"),
        (["--flops", "0"], "--flops"),
        (["--model", "torch.nn:Linear", "--kwargs", "{"], "--kwargs: not valid JSON"),
        (["--model", "torch.nn:Linear", "--kwargs", "{}"], "--model: torch.nn:Linear cannot be made"),
        (["--model", "math:pi"], "--model: math:pi cannot be made"),
        (["--hf", "nowhere", "--model", "a:B"], "--model and --hf: each names a model"),
        (["--hf", "nowhere"], "nowhere: No such file or directory"),
        (["--bench", "nowhere.json"], "make it by infinity bench --json nowhere.json"),
        (["--plot", "plan.pdf"], "--plot: expected a file name that ends in .png"),
        (["--json", "nowhere/plan.json"], "--json"),
        (["--optimizer", "Nothing"], "--optimizer: expected a class of torch.optim"),
        (["--parameters", "10", "--layers", "2", "--hidden", "64"], "--parameters: expected at least"),
        (["--ram", "much"], "ram: could not parse"),
        (["--precision", "int4"], "precision: Input should be"),
        (["--frobnicate"], "No such option"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(*GIVEN, *flags)
    assert said.code == 2
    assert words in said.err
    assert "Traceback" not in said.err
    if flags != ["--frobnicate"]:
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_bench_is_refused(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    for content, words in (
        ("[", "not valid JSON"),
        ("[]", "expected what infinity bench --nvme DIR --json writes"),
        ('{"best": {"nvme->host": {}}}', "expected what infinity bench --json writes"),
    ):
        file.write_text(content)
        said = call(*GIVEN, "--bench", file)
        assert (said.code, words in said.err) == (2, True), said.err
