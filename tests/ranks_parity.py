"""The parity table over ranks: which cases there are, and the job that runs some of them and compares.

A model with tied weights, a frozen parameter, dropout, a parameter that one rank does not use, and a block that some
steps do not use; each rank begins with values of its own, has batches of its own size and random numbers of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ByteSize
from torch import nn
from torch.nn import functional as F

import infinity
from covering import Pair, Row, covering_array
from infinity.config import Config
from infinity.engine import budget, saved
from infinity.engine.slicing import Slicing
from parity import CPU, Outcome, Tiered, assert_same, plan_of, same_bits, smallest
from parity_models import LENGTH, VOCAB, WIDTH, Block
from parity_table import OPTIMIZERS
from ranks_harness import Rank
from ranks_reference import DataParallel

NUM_STEPS = 3
MAX_GRAD_NORM = 0.02
"""Less than any norm of the cases, which each checks."""

AXES: dict[str, tuple[str, ...]] = {
    "ranks": ("1", "2", "3", "4"),
    "stage": ("0", "1", "2", "3"),
    "budgets": ("smallest", "half", "resident"),
    "precision": ("fp32", "bf16"),
    "backwards": ("1", "3", "3-no_sync"),
    "clipping": ("off", "max_grad_norm"),
    "optimizer": ("SGD", "AdamW", "AdamW-fused"),
    "schedule": ("at-step", "under-forward", "under-backward"),
}
NEVER: dict[Pair, str] = {
    (("clipping", "max_grad_norm"), ("schedule", "under-backward")): "the norm is known after the last gradient only",
}
_REFERENCE = ("ranks", "precision", "backwards", "clipping", "optimizer")
"""The axes that change what is computed."""


def allows(pair: Pair) -> bool:
    """Whether two values may meet."""
    return pair not in NEVER


def allows_layout(ranks: str, stage: str) -> bool:
    """On one rank no stage partitions anything: the first and the last suffice."""
    return ranks != "1" or stage in {"0", "3"}


def _cases() -> list[Row]:
    """Every value of any axis meets every number of ranks in every stage, and every two of the others meet."""
    layouts = [" ".join(both) for both in itertools.product(AXES["ranks"], AXES["stage"]) if allows_layout(*both)]
    others = {axis: values for axis, values in AXES.items() if axis not in {"ranks", "stage"}}
    rows = covering_array({"layout": layouts, **others}, allows)
    return [{**dict(zip(("ranks", "stage"), row.pop("layout").split(), strict=True)), **row} for row in rows]


CASES = _cases()


def hybrid_cases() -> list[Row]:
    """A case of the table on 4 ranks for each stage, where two share the state."""
    by_stage = {row["stage"]: row for row in CASES if row["ranks"] == "4"}
    return [{**row, "sharing": "2"} for row in by_stage.values()]


def full_cross() -> Iterator[Row]:
    """Every row that may be."""
    for values in itertools.product(*AXES.values()):
        row = dict(zip(AXES, values, strict=True))
        if allows_layout(row["ranks"], row["stage"]) and all(map(allows, itertools.combinations(row.items(), 2))):
            yield row


def reference_of(row: Row) -> tuple[str, ...]:
    """Cases with the same have the same numbers."""
    return tuple(row[axis] for axis in _REFERENCE) + ((row["sharing"],) if "sharing" in row else ())


class Lone(Block):
    """A block with a parameter that not all ranks use, and one that only the last backward of a step does."""

    def __init__(self) -> None:
        super().__init__()
        self.lone = nn.Parameter(torch.randn(WIDTH))
        self.rare = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, *, uses_lone: bool, uses_rare: bool) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        x = x * self.lone if uses_lone else x
        return x + self.rare if uses_rare else x


class Net(nn.Module):
    """See above."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.positions.weight.requires_grad_(False)
        self.always = Lone()
        self.sometimes = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: torch.Tensor, *, uses_lone: bool, uses_rare: bool, is_deep: bool) -> torch.Tensor:
        x = self.tokens(batch) + self.positions(torch.arange(batch.shape[1]))
        x = self.always(x, uses_lone=uses_lone, uses_rare=uses_rare)
        if is_deep:
            x = self.sometimes(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


class TieredRanks(Tiered):
    """The engine on several ranks."""

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside only add up."""
        return self.engine.no_sync()


def make(index: int, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A rank's own beginning."""
    torch.manual_seed(100 * index)
    model = Net()
    made = OPTIMIZERS[optimizer](model)
    torch.manual_seed(1 + index)
    return model, made


def train(rank: Rank, trainer: DataParallel | TieredRanks, backwards: str) -> dict[str, list[Any]]:
    """What each rank sees."""
    seen: dict[str, list[Any]] = {"losses": [], "norms": []}
    num_backwards = int(backwards[0])
    for step in range(NUM_STEPS):
        for micro in range(num_backwards):
            is_last = micro == num_backwards - 1
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank.index)
            batch = torch.randint(0, VOCAB, (2 + rank.index, LENGTH), generator=generator)
            is_alone = rank.index == min(1, rank.num_ranks - 1)
            with contextlib.nullcontext() if is_last or "no_sync" not in backwards else trainer.no_sync():
                loss = trainer.model(
                    batch,
                    uses_lone=not is_alone or (step, micro) == (2, 0),  # there one rank has one gradient less
                    uses_rare=is_last,
                    is_deep=step % 3 != 1,
                )
                trainer.backward(loss / num_backwards)
            seen["losses"].append(loss.detach())
        trainer.step()
        seen["norms"].append(trainer.grad_norm)
    return seen


def config_of(row: Row, index: int, nvme: Path) -> Config:
    """The engine's configuration; with host memory for half of the state each parameter is a sub-group of its own."""
    fields: dict[str, Any] = {
        "stage": int(row["stage"]),
        "precision": row["precision"],
        "max_grad_norm": MAX_GRAD_NORM if row["clipping"] == "max_grad_norm" else None,
        "overlap": row["schedule"] != "at-step",
        "nvme": nvme,
        "shard_ranks": int(row["sharing"]) if "sharing" in row else None,
        "sub_group_bytes": 1 if row["budgets"] == "half" else None,
    }
    if row["schedule"] == "under-backward":
        fields["accumulation_steps"] = 3 if row["backwards"] == "3" else 1
    if row["budgets"] == "resident":
        return Config(device="cpu", hbm="4MiB", ram="32MiB", **fields)

    def model() -> nn.Module:
        return make(index, row["optimizer"])[0]

    slicing = Slicing(0, int(row.get("sharing", row["ranks"])), int(row["stage"]))
    config = smallest(model, OPTIMIZERS[row["optimizer"]], slicing, **fields)
    if row["budgets"] == "smallest":
        return config
    made = make(index, row["optimizer"])
    config = config.model_copy(update={"hbm": ByteSize(2 * config.hbm), "ram": ByteSize(1 << 40)})
    ram = plan_of(*made, config, slicing).state_bytes // 2
    while ram != config.ram:
        config = config.model_copy(update={"ram": ByteSize(ram)})
        ram = max(ram, plan_of(*made, config, slicing).needs(made[0], config, CPU)[1])
    return config


def anchor(rank: Rank, *, backwards: str) -> dict[str, bool]:
    """A job: whether weights are the same, and close, that were trained with and without the order of ranks."""
    dist.init_process_group("gloo")
    ends = []
    for has_own_order in (False, True):
        model, optimizer = make(rank.index, "SGD")
        plain = DataParallel(model, optimizer, "fp32", has_own_order=has_own_order)
        ends.append(plain.outcome(train(rank, plain, backwards)).weights)
    dist.destroy_process_group()
    one, other = ends
    return {
        "same": all(same_bits(value, other[name]) for name, value in one.items()),
        "close": all(torch.allclose(value, other[name]) for name, value in one.items()),
    }


def compare(rank: Rank, *, rows: list[Row]) -> dict[str, Any]:
    """A job: train as each row says, and compare with what plain PyTorch computes on the same ranks.

    Args:
        rank: this one.
        rows: of the table; with ``sharing``, so many ranks share the state, and others have copies.

    Returns:
        ``clip_ulps``: of all references.
    """
    saved._SMALL_BYTES, budget.PLANES_PAY_BELOW = 128, 1  # as ``parity.tiny_scale``
    dist.init_process_group("gloo")
    references: dict[tuple[str, ...], Outcome] = {}
    clip_ulps: list[int] = []
    for row in rows:
        if reference_of(row) not in references:
            references[reference_of(row)] = _expected(rank, row, clip_ulps)
        try:
            _check(rank, row, references[reference_of(row)])
        except BaseException:
            print(f"case: {row}", flush=True)
            raise
    dist.destroy_process_group()
    return {"clip_ulps": clip_ulps}


def _expected(rank: Rank, row: Row, clip_ulps: list[int]) -> Outcome:
    bound = MAX_GRAD_NORM if row["clipping"] == "max_grad_norm" else None
    model, optimizer = make(rank.index, row["optimizer"])
    before = model.always.lone.detach().clone()  # type: ignore[union-attr,operator]
    num_sharing = int(row["sharing"]) if "sharing" in row else None
    plain = DataParallel(model, optimizer, row["precision"], bound, num_sharing=num_sharing)
    expected = plain.outcome(train(rank, plain, row["backwards"]))
    clip_ulps += plain.clip_ulps
    assert all(bool(value.isfinite().all()) for value in expected.weights.values())
    assert not same_bits(expected.weights["always.lone"], before)
    assert bound is None or all(float(norm) > bound for norm in expected.returned["norms"])
    return expected


def _check(rank: Rank, row: Row, expected: Outcome) -> None:
    with tempfile.TemporaryDirectory(dir=rank.directory) as own:
        config = config_of(row, rank.index, Path(own))
        model, optimizer = make(rank.index, row["optimizer"])
        with infinity.initialize(model, optimizer, config) as engine:
            tiered = TieredRanks(engine, optimizer)
            got = tiered.outcome(train(rank, tiered, row["backwards"]))
            for name, usage in engine.usage().items():
                assert usage.peak_bytes <= usage.budget_bytes, name
        for name in ("returned", "weights", "computing", "optimizer", "random_state"):
            assert_same(getattr(got, name), getattr(expected, name), name)
