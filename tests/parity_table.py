"""The parity table: which cases there are, and how one is run. ``python tests/parity_table.py`` writes docs/parity.md.

Cases are rows of pairwise covering arrays: every two values of two axes meet in some case, but for the pairs in
``NEVER``, which says why. Each trains ``NUM_STEPS`` steps, with an evaluation between, in plain PyTorch and under the
engine, and compares what ``parity`` compares: losses, norms, weights, states, buffers, random numbers, bit by bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import families
import families_hf
from covering import Pair, Row, covering_array
from families import Family
from parity import Parity, Script, Trainer, build, same_bits

NUM_STEPS = 4
DOCUMENT = Path(__file__).parents[1] / "docs" / "parity.md"
SCALER: dict[str, Any] = {"init_scale": 2.0**13, "growth_interval": 2}
OVERFLOWING = 1
"""The step whose gradients overflow under fp16."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What an optimizer is made for."""
    return [param for param in model.parameters() if param.requires_grad]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Of matrices, which is all that Muon takes; the rest is frozen."""
    for param in model.parameters():
        param.requires_grad_(param.requires_grad and param.ndim == 2)
    make: Any = getattr(torch.optim, "Muon", None)
    if make is None:
        pytest.skip(f"torch {torch.__version__} has no Muon")
    return make(trained(model), lr=0.02)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(trained(m), lr=0.01),
    "AdamW-foreach": lambda m: torch.optim.AdamW(trained(m), lr=0.01, foreach=True),
    "AdamW-fused": lambda m: torch.optim.AdamW(trained(m), lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda m: torch.optim.SGD(trained(m), lr=0.1, momentum=0.9),
    "SGD-fused": lambda m: torch.optim.SGD(trained(m), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adafactor": lambda m: torch.optim.Adafactor(trained(m), lr=0.01),
    "Muon": muon,
    "Adagrad": lambda m: torch.optim.Adagrad(trained(m), lr=0.05),
    "RMSprop": lambda m: torch.optim.RMSprop(trained(m), lr=0.01, momentum=0.5, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(trained(m), lr=0.01),
    "RAdam-foreach": lambda m: torch.optim.RAdam(trained(m), lr=0.01, foreach=True),
}

CLIPPING: dict[str, tuple[float, float]] = {
    "off": (math.inf, 2.0),
    "max_grad_norm": (0.02, 2.0),
    "inf-norm": (0.002, math.inf),
}
"""The bound, which each family's gradients exceed, and which norm."""

SCHEDULES: dict[str, Callable[[int], dict[str, Any]]] = {
    "at-step": lambda num_backwards: {"overlap": False},
    "under-forward": lambda num_backwards: {"overlap": True},
    "under-backward": lambda num_backwards: {"overlap": True, "accumulation_steps": num_backwards},
}

_NUMBERS: dict[str, Sequence[str]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "clipping": tuple(CLIPPING),
    "backwards": ("1", "3"),
    "schedule": tuple(SCHEDULES),
    "budgets": ("smallest", "half", "resident"),
}
AXES: dict[str, Sequence[str]] = {"family": tuple(families.FAMILIES), "optimizer": tuple(OPTIMIZERS), **_NUMBERS}
AXES_HF: dict[str, Sequence[str]] = {
    "family": tuple(families_hf.FAMILIES),
    "optimizer": ("AdamW", "SGD", "Adafactor", "Muon"),
    **_NUMBERS,
}

_NO_NORM_YET = "the norm is known after the last gradient only, so nothing is stepped before but on trial"
NEVER: dict[Pair, str] = {
    (("clipping", "max_grad_norm"), ("schedule", "under-backward")): _NO_NORM_YET,
    (("clipping", "inf-norm"), ("schedule", "under-backward")): _NO_NORM_YET + "; refused",
    (("family", "moe"), ("optimizer", "SGD-fused")): "PyTorch itself fails where a parameter gets its first gradient "
    "after others",
    (("family", "encoder-decoder"), ("budgets", "smallest")): "`nn.MultiheadAttention` reads its output projection "
    "without calling it, which the smallest budgets do not foresee",
    (("family", "ViT"), ("budgets", "smallest")): "`ViTModel` reads the dtype of its projection's weight, which keeps "
    "that gathered for all of its forward; the smallest budgets do not foresee it",
}


def allows(pair: Pair) -> bool:
    """Whether two values may meet."""
    return pair not in NEVER


CASES = covering_array(AXES, allows)
CASES_HF = covering_array(AXES_HF, allows)


def full_cross(family: str, optimizer: str) -> Iterator[Row]:
    """Every row of the other axes that may be."""
    for values in itertools.product(*_NUMBERS.values()):
        row = {"family": family, "optimizer": optimizer, **dict(zip(_NUMBERS, values, strict=True))}
        if all(map(allows, itertools.combinations(row.items(), 2))):
            yield row


def name_of(row: Row) -> str:
    """What a case is called in the output of pytest."""
    return "-".join(row.values())


def script_of(family: Family, row: Row) -> Script:
    """Training as the row says, and between two steps an evaluation and what the family does there."""
    num_backwards = int(row["backwards"])
    bound, norm_type = CLIPPING[row["clipping"]]

    def script(trainer: Trainer) -> dict[str, list[Any]]:
        seen: dict[str, list[Any]] = {"losses": [], "norms": [], "scales": [], "between": []}
        for step in range(NUM_STEPS):
            for micro in range(num_backwards):
                loss = family.loss(trainer.model, 10 * step + micro) / num_backwards
                trainer.backward(loss * 1e5 if row["precision"] == "fp16" and step == OVERFLOWING else loss)
                seen["losses"].append(loss.detach())
            if row["clipping"] == "inf-norm":
                trainer.clip(bound, norm_type)
            trainer.step()
            seen["norms"].append(trainer.grad_norm)
            seen["scales"].append(trainer.loss_scale)
            if step == NUM_STEPS // 2:
                trainer.model.eval()
                with torch.no_grad():
                    seen["between"].append(family.loss(trainer.model, 999))
                trainer.model.train()
                seen["between"].append(family.between(trainer.model))
        return seen

    return script


def run(known: Mapping[str, Family], row: Row, nvme: Path) -> None:
    """Run a case and compare."""
    family = known[row["family"]]
    bound, _ = CLIPPING[row["clipping"]]
    case = Parity(
        family.make_model,
        OPTIMIZERS[row["optimizer"]],
        script_of(family, row),
        row["precision"],
        SCALER if row["precision"] == "fp16" else None,
        max_grad_norm=bound if row["clipping"] == "max_grad_norm" else None,
    )
    check_strength(case, bound)
    engine = case.check(getattr(case, row["budgets"])(nvme, **SCHEDULES[row["schedule"]](int(row["backwards"]))))
    assert (engine.num_skipped_steps > 0) == (row["precision"] == "fp16")
    assert engine.last_step is not None
    moved_bytes = engine.last_step.nvme_read_bytes + engine.last_step.nvme_written_bytes
    assert (moved_bytes > 0) == (row["budgets"] != "resident")
    assert list(nvme.iterdir()) == []


def check_strength(case: Parity, bound: float) -> None:
    """That the case could fail: numbers are finite, weights have changed, and clipping clipped."""
    before, _ = build(case.make_model, case.make_optimizer)
    weights = case.expected.weights
    assert any(not same_bits(weights[name], value) for name, value in before.named_parameters())
    assert all(bool(weights[name].isfinite().all()) for name, _ in before.named_parameters())
    norms = case.expected.returned["norms"]
    assert math.isinf(bound) or any(bound < float(norm) < math.inf for norm in norms)


def document() -> str:
    """What docs/parity.md says."""
    known = {**families.FAMILIES, **families_hf.FAMILIES}

    def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))

    def listing(cases: Sequence[Row]) -> str:
        return table(list(cases[0]), [list(row.values()) for row in cases])

    never = [(f"{first} {value}", f"{second} {other}", why) for ((first, value), (second, other)), why in NEVER.items()]
    return _TEXT.format(
        num_steps=NUM_STEPS,
        num_own=len(CASES),
        num_hf=len(CASES_HF),
        families=table(["family", "what it is about"], [(name, family.what) for name, family in known.items()]),
        never=table(["this", "never meets", "because"], never),
        own=listing(CASES),
        hf=listing(CASES_HF),
    )


_TEXT = """# What is compared with plain PyTorch

Written by `python tests/parity_table.py` from the tables that the tests run; do not edit.

Each case trains a tiny model for {num_steps} steps, with an evaluation between, in plain PyTorch and under the engine,
and compares bit by bit: losses and their scale, norms of gradients, weights at full precision and as they compute,
optimizer state, buffers, and the state of the random generator. {num_own} cases for our own families
(`tests/test_families.py`) and {num_hf} for Hugging Face `transformers` (`tests/test_families_hf.py`) are pairwise
covering arrays: every two values of two axes meet in a case, but for those listed below. For one family with AdamW,
every combination of the other axes is run as well. Single behaviours (recomputation, thawing, thread counts, other
optimizers) have tests of their own.

- **optimizer**: from `torch.optim`. AdamW-fused has `amsgrad`, SGD momentum 0.9 (SGD-fused Nesterov's), RMSprop
  momentum and centring. Muon takes matrices; the rest of the model is frozen there.
- **precision**: bf16 and fp16 with fp32 masters; under fp16 a step overflows, is skipped and halves the scale
  of the loss, which grows every 2 steps, as `GradScaler` does.
- **clipping**: `max_grad_norm` in the configuration, or a call of `clip_grad_norm_` with the infinity norm; both small
  enough to clip, which each case checks.
- **backwards** in a step.
- **schedule**: the optimizer steps at `step()` (`overlap=False`), under the next forward, or under backward
  (`accumulation_steps`).
- **budgets**: the smallest that can train the model, host memory for half of its state, or room for everything.

{families}
## Pairs that never meet

{never}
## Our own families

{own}
## Architectures of `transformers`

{hf}"""


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
