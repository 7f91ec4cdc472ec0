"""Lightning's Trainer over the engine: the numbers of the plain Trainer, its checkpoints, and nothing left behind."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import infinity
from infinity.errors import ConfigError, DirectoryError, EngineStateError, ModelError, StorageError
from infinity.integrations import missing
from infinity.integrations.lightning import InfinityStrategy, export_checkpoint
from launch import run_ranks

pytestmark = [
    # Lightning asks PyTorch's pytree by a name that this PyTorch has deprecated
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated:DeprecationWarning"),
    # Lightning wants more workers than 20 samples need; workers would be processes
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # what is resumed writes where the run before has written
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Net(lightning.LightningModule):
    """Made in ``configure_model``; keeps its losses."""

    width, depth = 16, 2

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers: nn.Module | None = None
        self.losses: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if self.layers is None:
            inner = [
                nn.Sequential(nn.Linear(16, self.width), nn.ReLU(), nn.Linear(self.width, 16))
                for _ in range(self.depth)
            ]
            self.layers = nn.Sequential(nn.Linear(4, 16), *inner, nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.layers is not None
        return self.layers(inputs)  # type: ignore[no-any-return]

    def compute(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.compute(batch)
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        loss = self.compute(batch)
        self.validated.append(loss.clone())
        self.log("val", loss)

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Scheduled(Net):
    """Two groups, and a scheduler that goes by steps."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [param for param in self.parameters() if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in self.parameters() if param.ndim == 1], "lr": 0.02},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}


class Plateaued(Net):
    """A scheduler that goes by a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Manual(Net):
    """Two steps for each batch, by hand; everything is made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        super().configure_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = self.compute(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.losses.append(loss.detach().clone())


def loader(*, shuffle: bool = False, size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))
    return DataLoader(data, batch_size=size, shuffle=shuffle)


class Runs:
    """Makes trainers that write below one directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.nvme = place / "nvme"
        self.nvme.mkdir()

    def strategy(self, **fields: Any) -> InfinityStrategy:
        return InfinityStrategy({"hbm": "64MiB", "ram": "64MiB", "nvme": [self.nvme]} | fields)

    def trainer(self, strategy: Any, **settings: Any) -> lightning.Trainer:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        usual: dict[str, Any] = {
            "max_epochs": 2,
            "enable_checkpointing": "callbacks" in settings,
            "default_root_dir": self.place,
        }
        return lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, **(quiet | usual | settings))

    def fit(
        self, make: Callable[[], Net], strategy: Any, ckpt_path: Any = None, **settings: Any
    ) -> tuple[Net, lightning.Trainer]:
        lightning.seed_everything(3, verbose=False)
        module, trainer = make(), self.trainer(strategy, **settings)
        shuffle = "overfit_batches" not in settings
        trainer.fit(module, loader(shuffle=shuffle), loader(), ckpt_path=ckpt_path)
        assert list(self.nvme.iterdir()) == []
        return module, trainer


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def assert_same(one: Net, other: Net) -> None:
    assert len(one.losses) == len(other.losses) > 0
    assert all(map(torch.equal, one.losses, other.losses))
    assert len(one.validated) == len(other.validated)
    assert all(map(torch.equal, one.validated, other.validated))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Net, {}),
        (Net, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "max_steps": 3}),
        (Net, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "overfit_batches": 2}),
        (Net, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
        (Scheduled, {}),
        (Plateaued, {"max_epochs": 4}),
        (Manual, {"max_epochs": 1}),
    ],
    ids=["plain", "accumulated", "by-value", "bf16-mixed", "scheduled", "plateau", "manual"],
)
def test_the_numbers_are_those_of_the_plain_trainer(
    runs: Runs, make: Callable[[], Net], settings: dict[str, Any]
) -> None:
    plain, _ = runs.fit(make, "auto", **settings)
    ours, _ = runs.fit(make, runs.strategy(), **settings)
    assert_same(plain, ours)


def test_a_resumed_run_is_the_one_that_never_stopped(runs: Runs) -> None:
    whole, _ = runs.fit(Scheduled, "auto", max_epochs=3, accumulate_grad_batches=2)

    def callbacks() -> list[Any]:
        keep = ModelCheckpoint(runs.place / "kept", monitor="val", save_top_k=1, save_last=True)
        return [keep, EarlyStopping("val", patience=9), LearningRateMonitor("step")]

    settings = {"accumulate_grad_batches": 2, "logger": CSVLogger(runs.place, "log"), "log_every_n_steps": 1}
    begun, trainer = runs.fit(Scheduled, runs.strategy(), callbacks=callbacks(), **settings)
    keep: Any = trainer.checkpoint_callback
    assert {path.name for path in (runs.place / "kept").iterdir()} == {"last.ckpt", Path(keep.best_model_path).name}
    assert "lr-SGD/pg2" in (runs.place / "log" / "version_0" / "metrics.csv").read_text()

    last = runs.place / "kept" / "last.ckpt"
    [tested] = trainer.test(begun, loader(), ckpt_path="best", verbose=False)
    assert tested["val"] == pytest.approx(float(keep.best_model_score), rel=1e-6)
    predicted: Any = trainer.predict(begun, loader(), ckpt_path=str(last))
    plain: Any = runs.trainer("auto").predict(begun, loader())
    assert all(map(torch.equal, predicted, plain))
    with pytest.raises(EngineStateError, match=r"weights_only=True"):
        trainer.save_checkpoint(runs.place / "after.ckpt")

    file = export_checkpoint(last, runs.place / "plain.ckpt")
    loaded = torch.load(file, weights_only=True)
    assert loaded["hyper_parameters"] == {"lr": 1e-2}
    assert all(torch.equal(value, loaded["state_dict"][name]) for name, value in begun.state_dict().items())
    with pytest.raises(DirectoryError, match="left as it is"):
        export_checkpoint(last, file)

    resumed, _ = runs.fit(Scheduled, runs.strategy(), last, max_epochs=3, callbacks=callbacks(), **settings)
    assert all(map(torch.equal, whole.losses, begun.losses + resumed.losses))
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))


def test_a_file_of_the_plain_trainer_goes_on_under_the_engine(runs: Runs) -> None:
    _, trainer = runs.fit(Net, "auto")
    trainer.save_checkpoint(runs.place / "plain.ckpt")
    plain, _ = runs.fit(Net, "auto", runs.place / "plain.ckpt", max_epochs=3)
    ours, trainer = runs.fit(Net, runs.strategy(), runs.place / "plain.ckpt", max_epochs=3)
    assert_same(plain, ours)
    trainer.save_checkpoint(runs.place / "after.ckpt", weights_only=True)
    saved = torch.load(runs.place / "after.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in plain.state_dict().items())


class Wide(Net):
    """More than the RAM that it gets."""

    width, depth = 8192, 4


def test_a_module_that_is_larger_than_ram_lives_in_checkpoints(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    keep = ModelCheckpoint(runs.place / "kept", filename="weights", save_weights_only=True)
    ours, trainer = runs.fit(lambda: Wide(1e-4), runs.strategy(hbm="8MiB", ram="3MiB"), max_epochs=1, callbacks=[keep])
    plain, other = runs.fit(lambda: Wide(1e-4), "auto", max_epochs=1)
    assert all(map(torch.equal, ours.losses, plain.losses))
    assert "more than Config.ram" in caplog.text
    with pytest.raises(EngineStateError, match=r"left without weights when its engine was closed.*give ckpt_path"):
        trainer.test(ours, loader(), verbose=False)
    with pytest.raises(EngineStateError, match="the last checkpoint of the fit has them"):
        trainer.save_checkpoint(runs.place / "after.ckpt", weights_only=True)
    tested = trainer.test(ours, loader(), ckpt_path="best", verbose=False)
    assert tested == other.test(plain, loader(), verbose=False)
    with pytest.raises(KeyError, match="contains only the model"):
        trainer.fit(ours, loader(), loader(), ckpt_path="best")


class Failing(Net):
    """Fails somewhere in the second step."""

    where = ""

    def on_after_backward(self) -> None:
        if len(self.losses) == 2 and self.where == "interrupted":
            raise KeyboardInterrupt

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if len(self.losses) == 2 and self.where == "hook":
            raise ValueError("as a hook does")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        if len(self.losses) == 2 and self.where == "forward":
            raise ValueError("in the forward")
        return outputs


@pytest.mark.parametrize(
    ("where", "error"), [("hook", ValueError), ("forward", ValueError), ("interrupted", SystemExit)]
)
def test_what_fails_in_a_fit_closes_the_engine(runs: Runs, where: str, error: type[BaseException]) -> None:
    threads = threading.active_count()
    module, strategy = Failing(), runs.strategy()
    module.where = where
    keep = ModelCheckpoint(runs.place / "kept", filename="failed", save_on_exception=True)
    trainer = runs.trainer(strategy, callbacks=[keep], num_sanity_val_steps=0)
    with pytest.raises(error):
        trainer.fit(module, loader(), loader())
    assert list(runs.nvme.iterdir()) == []
    assert threading.active_count() == threads
    with pytest.raises(EngineStateError, match="no engine outside of fit"):
        strategy.engine  # noqa: B018
    module.where = ""
    assert module(torch.ones(1, 4)).isfinite().all()
    stored = infinity.open_checkpoint(next((runs.place / "kept" / "failed.ckpt").glob("state-*")))
    with stored:
        assert all(torch.equal(stored.weights[name], value) for name, value in module.state_dict().items())


class Nothing(Net):
    def configure_optimizers(self) -> Any:
        return [[], []]


@pytest.mark.parametrize(
    ("fields", "settings", "error", "message"),
    [
        ({}, {"precision": "64-true"}, ConfigError, "got '64-true'"),
        ({"precision": "bf16"}, {"precision": "16-true"}, ConfigError, r"Trainer\(precision='16-true'\)"),
        ({"max_grad_norm": 1.0}, {"gradient_clip_val": 1.0}, ConfigError, "both clip"),
        ({"accumulation_steps": 2}, {}, ConfigError, "accumulate_grad_batches"),
        ({"accumulation_steps": 1}, {"gradient_clip_val": 1.0}, ConfigError, "clip with Config"),
        ({"durability": "checkpoint"}, {}, ConfigError, "ModelCheckpoint"),
        ({}, {"callbacks": [StochasticWeightAveraging(0.1)]}, ConfigError, "StochasticWeightAveraging averages"),
        ({}, {"sync_batchnorm": True}, ConfigError, "convert_sync_batchnorm"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    runs: Runs, fields: dict[str, Any], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runs.trainer(runs.strategy(**fields), **settings).fit(Net(), loader(), loader())
    assert list(runs.nvme.iterdir()) == []


def test_what_else_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"Nothing.configure_optimizers\(\): expected one optimizer, got 0"):
        runs.trainer(runs.strategy()).fit(Nothing(), loader(), loader())
    (runs.place / "a.ckpt").mkdir()
    with pytest.raises(StorageError, match=r"there is no lightning.ckpt in it"):
        runs.trainer(runs.strategy()).fit(Net(), loader(), loader(), ckpt_path=str(runs.place / "a.ckpt"))
    with pytest.raises(DirectoryError, match="left as it is"):
        runs.strategy().remove_checkpoint(runs.place / "a.ckpt")
    assert (runs.place / "a.ckpt").is_dir()
    with pytest.raises(ConfigError, match="a path on a file system"):
        runs.strategy().remove_checkpoint("s3://bucket/a.ckpt")
    with pytest.raises(ConfigError, match="not both; got ram"):
        InfinityStrategy({"hbm": "1GiB"}, ram="1GiB")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "one" else object())
    with pytest.raises(ConfigError, match=r"import from infinity.integrations.other"):
        missing.need("one", extra="lightning", instead="other")


def test_half_precision_trains_with_full_weights_in_checkpoints(runs: Runs) -> None:
    keep = ModelCheckpoint(runs.place / "kept", filename="end")
    module, _ = runs.fit(Net, runs.strategy(), precision="bf16-true", callbacks=[keep])
    assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
    [state] = (runs.place / "kept" / "end.ckpt").glob("state-*")
    with infinity.open_checkpoint(state) as stored:
        assert {value.dtype for value in dict(stored.weights).values()} == {torch.float32}
    assert module.losses[-1] < module.losses[0]


def test_a_checkpoint_in_the_middle_of_an_accumulation(runs: Runs) -> None:
    """Validation comes after the third batch, and a checkpoint with it, when the gradients of one wait."""
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 3}
    plain, _ = runs.fit(Net, "auto", **settings)
    keep = ModelCheckpoint(runs.place / "kept", monitor="val", save_top_k=-1)
    ours, _ = runs.fit(Net, runs.strategy(), callbacks=[keep], **settings)
    assert_same(plain, ours)
    assert len(list((runs.place / "kept").iterdir())) == 2


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="pytorch_lightning is not installed")
def test_the_other_package_has_a_strategy_of_its_own(runs: Runs) -> None:
    other: Any = importlib.import_module("pytorch_lightning")
    bound: Any = importlib.import_module("infinity.integrations.pytorch_lightning").InfinityStrategy
    trainer = other.Trainer(
        accelerator="cpu", devices=1, strategy=bound(nvme=[runs.nvme]), logger=False, default_root_dir=runs.place
    )
    assert isinstance(trainer.strategy, other.strategies.ParallelStrategy)
    assert not isinstance(trainer.strategy, lightning.pytorch.strategies.ParallelStrategy)


class Even(Net):
    """Draws nothing, so that ranks and one process compute the same."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.layers is not None
        self.layers = nn.Sequential(*[each for each in self.layers.children() if not isinstance(each, nn.Dropout)])


_RANK = """
import datetime, pathlib, warnings
warnings.simplefilter("default")
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from infinity.integrations.lightning import InfinityStrategy
from test_lightning import Even, loader
place = pathlib.Path(os.environ["PLACE"])
lightning.seed_everything(3, verbose=False)
config = {"hbm": "64MiB", "ram": "64MiB", "nvme": [place / "nvme"]}
strategy = InfinityStrategy(config, timeout=datetime.timedelta(seconds=60))
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
keep = ModelCheckpoint(place / "kept", save_last=True)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=[keep], **quiet
)
module = Even()
batches = loader(size=2)  # Lightning's own sampler shuffles
sampler = torch.utils.data.DistributedSampler(batches.dataset, num_ranks, rank, shuffle=False)
trainer.fit(module, torch.utils.data.DataLoader(batches.dataset, batch_size=2, sampler=sampler), batches)
torch.save({"weights": module.state_dict(), "losses": module.losses}, place / f"{rank}.pt")
assert not list((place / "nvme").iterdir())
"""


def test_two_ranks_train_as_one_on_the_batches_of_both(runs: Runs) -> None:
    """Started as torchrun does it."""
    lightning.seed_everything(3, verbose=False)
    plain = Even()
    runs.trainer("auto").fit(plain, loader(), loader())
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = run_ranks(
        _RANK, PLACE=str(runs.place), PYTHONPATH=path, TORCHELASTIC_RUN_ID="test", LOCAL_WORLD_SIZE="2", GROUP_RANK="0"
    )
    assert [rank.status for rank in ended] == [0, 0], ended
    found = [torch.load(runs.place / f"{rank}.pt", weights_only=True) for rank in range(2)]
    means = (torch.stack(found[0]["losses"]) + torch.stack(found[1]["losses"])) / 2
    torch.testing.assert_close(means, torch.stack(plain.losses))
    for name, value in plain.state_dict().items():
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])
        torch.testing.assert_close(found[0]["weights"][name], value)
