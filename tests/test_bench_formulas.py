"""``bench/sizing_table.py`` and ``bench/ranks.py``: what they print is what the formulas and the counters say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ranks
import sizing_table
import torch
from lib_work import Work
from lib_worker import WorkerError
from ranks import Case, Contender, Row

from infinity.train.model import GPT, GPTShape

_DOCUMENT = Path(sizing_table.__file__).parents[1] / "docs" / "distributed.md"
_TINY = GPTShape(num_layers=2, hidden_size=64, num_heads=2, seq_length=32, vocab_size=256)


def test_the_table_in_the_document_is_the_one_that_the_script_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sizing_table.py"])
    sizing_table.main()
    [table] = re.findall(
        r"^<!-- sizing_table -->\n(.*)^<!-- /sizing_table -->$", _DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    assert table == capsys.readouterr().out


def test_a_shape_has_as_many_parameters_as_its_model() -> None:
    with torch.device("meta"):
        expected = sum(param.numel() for param in GPT(_TINY).parameters())
    assert sizing_table.num_parameters(_TINY) == expected
    counts = {name: sizing_table.num_parameters(sizing_table.shape_of(name)) for name in sizing_table.SHAPES}
    assert counts["1T"] == pytest.approx(1e12, rel=0.02)
    assert all(f"{count / 1e9:.1f}B".startswith(name[:1]) for name, count in counts.items() if name != "1T")


def test_a_faster_machine_has_lower_bounds() -> None:
    state, parameters = sizing_table.state_of("175B")

    def least(*flags: str) -> list[float]:
        cells = sizing_table.cells(state, parameters, 3, 8, sizing_table.parse(flags))
        return [float(cell) for cell in cells[4:8]]

    computing, sending, storing, step = least("--ram-gb", "0")
    assert step == max(computing, sending, storing)
    assert least("--ram-gb", "0", "--tflops", "800")[0] == pytest.approx(computing / 2, rel=0.01)
    assert least("--ram-gb", "0", "--network-gb-s", "50")[1] == pytest.approx(sending / 2, rel=0.01)
    assert least("--ram-gb", "0", "--nvme-gb-s", "12")[2] == pytest.approx(storing / 2, rel=0.02)
    assert least("--ram-gb", "100000")[2] == 0


def test_bytes_agree_exactly_or_at_most() -> None:
    assert Row(2, 3, "bf16", "sent", 10, 10).agrees
    assert not Row(2, 3, "bf16", "sent", 9, 10).agrees
    assert Row(2, 3, "bf16", "nvme read", 9, 10, exact=False).agrees
    assert not Row(2, 3, "bf16", "nvme read", 11, 10, exact=False).agrees
    assert "DIFFERS" in str(Row(2, 3, "bf16", "sent", 9, 10))


@pytest.mark.parametrize(("measured", "code"), [(10.0, 0), (11.0, 1)])
def test_a_figure_that_is_not_what_the_formula_says_is_an_error(
    measured: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "count", lambda *_: [Row(2, 3, "bf16", "sent, all-gather", measured, 10)])
    assert ranks.main(["--nvme", str(tmp_path), "--ranks", "2", "--rounds", "0"]) == code
    assert not list(tmp_path.iterdir())


def test_two_ranks_move_what_the_formulas_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("bf16, 2 backwards, 1 in no_sync", "bf16", num_backwards=2, in_no_sync=1)
    monkeypatch.setattr(ranks, "CASES", (Case("bf16", "bf16"), case))
    rows = ranks.count(_TINY, 2, tmp_path, tmp_path / "log", on_nvme=False)
    assert [row for row in rows if not row.agrees] == []
    assert {(row.stage, row.case) for row in rows} == {
        (stage, name) for stage in range(4) for name in ("bf16", case.name)
    }
    assert {row.what for row in rows if row.stage == 3} == {
        "sent, all-gather", "sent, reduce-scatter",
        "kept, parameters", "kept, master weights", "kept, optimizer states", "kept, gradients",
    }  # fmt: skip


def test_who_cannot_run_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **others: object) -> None:
        raise WorkerError("worker ended\nno library")

    monkeypatch.setattr(ranks, "RankGroup", fail)
    contenders = ranks.compare(_TINY, Work(1, 8), 1, None, tmp_path / "log")
    assert [each.failure for each in contenders] == ["no library", "no library"]
    assert Contender("x", failure="why").as_dict() == {"name": "x", "skipped": "why"}
