"""``EngineStrategy``: Lightning's ``Trainer`` over the engine; ``binding.py`` makes ``InfinityStrategy`` of it.

The LightningModule is the model: it is given to ``infinity.initialize`` as a whole, with the one optimizer that
``configure_optimizers`` returns. Its steps (``training_step``, …) run as the forward of the whole model, as they do
under DDP, so that the engine sees where a forward begins and ends. In manual optimization they run as they are, because
an optimizer steps inside them.

What Lightning's DDP strategy does between processes (groups, reductions of metrics) is done by its code.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infinity.config import Config
from infinity.engine.deferred import deferred_init
from infinity.engine.engine import Engine
from infinity.engine.initialize import initialize
from infinity.errors import ConfigError, EngineStateError, InfinityError, ModelError
from infinity.integrations.lightning import checkpoints
from infinity.integrations.lightning.modules import await_values, call_as_forward, idle_optimizer, move_others
from infinity.integrations.lightning.precision import EnginePrecision
from infinity.integrations.lightning.settings import agreed, check_trainer, name_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base  # whose methods ``bind`` borrows
else:
    _Base = object

_log = logging.getLogger(__name__)


class EngineStrategy(_Base):
    """``Trainer(strategy=InfinityStrategy(hbm="4GiB", ram="16GiB", nvme=["/mnt/nvme0"]))``.

    Args:
        config: the engine's configuration, its fields as a dictionary, or the path of a JSON file.
        timeout: how long processes wait for each other when they meet.
        fields: of ``Config``, instead of ``config``.

    Raises:
        ConfigError: both are given, or a field cannot be used.

    Attributes:
        config: what was given; the engine's own also has what the Trainer says of device and precision.
    """

    strategy_name = "infinity"

    precision_type: type[EnginePrecision]
    plain_precisions: tuple[type, ...]
    launcher_type: Callable[..., Any]

    def __init__(
        self,
        config: Config | dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        timeout: timedelta = timedelta(minutes=30),
        **fields: Any,
    ) -> None:
        if config is not None and fields:
            raise ConfigError(f"InfinityStrategy: give config, or fields of it, not both; got {', '.join(fields)}")
        self.config = Config.of(fields if config is None else config)
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._loaded_from: Path | None = None
        self._emptied: LightningModule | None = None  # left without weights, and not given others
        super().__init__()
        self.num_nodes = 1
        self._process_group_backend: str | None = None
        self._timeout: timedelta | None = timeout
        self._start_method = "popen"

    @property
    def engine(self) -> Engine:
        """The engine, from when the Trainer has set up until it has ended.

        Raises:
            EngineStateError: there is none now.
        """
        if self._engine is None:
            raise EngineStateError(
                "InfinityStrategy has no engine outside of fit(), validate(), test() and predict(): it is closed when "
                "they end. Save in the fit, with ModelCheckpoint; after it, save_checkpoint(path, weights_only=True)"
            )
        return self._engine

    # Where it runs

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks, each of which is to get its own data."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How data are divided."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Have ranks meet."""
        super().setup_environment()
        if self.is_distributed:
            self.setup_distributed()

    def _configure_launcher(self) -> None:
        """Start the other processes of this host, unless there is one only, or torchrun has done it."""
        if self.num_processes * self.num_nodes > 1:
            assert self.cluster_environment is not None
            self._launcher = self.launcher_type(self.cluster_environment, self.num_processes, self.num_nodes)

    # From the Trainer's setup to its end

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Leave dtypes and devices to the engine."""
        yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """What ``configure_model`` makes takes no memory: see ``infinity.deferred_init``."""
        with deferred_init():
            yield

    def model_to_device(self) -> None:
        """Nothing: the engine brings parameters to the device when they are needed, and buffers at its start."""

    def setup(self, trainer: Trainer) -> None:
        """Put the LightningModule under an engine.

        Raises:
            ConfigError: the Trainer and ``Config`` contradict each other, or ask for what cannot be done.
            InfinityError: see ``infinity.initialize``.
            ModelError: ``configure_optimizers`` returns none or several optimizers.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        config = agreed(self.config, str(self.precision_plugin.precision))
        config = check_trainer(config, trainer, self.root_device)
        is_training = trainer.state.fn == "fit"
        if self._emptied is module:
            await_values(module)
        if is_training:
            self.setup_optimizers(trainer)
            optimizer = self._only_optimizer()
        else:
            self.optimizers, self.lr_scheduler_configs = [], []
            optimizer = idle_optimizer(module)
        move_others(module, self.root_device)
        self._error = None
        self._engine = initialize(module, optimizer, config)
        if is_training:
            self.optimizers = [self._engine.optimizer]
        self.model = module
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Note why it ends."""
        self._error = exception

    def teardown(self) -> None:
        """Close the engine. The module keeps its weights, if they fit in ``Config.ram``; else it is left without."""
        engine, self._engine = self._engine, None
        error, self._error = self._error, None
        try:
            if engine is not None:
                self._close(engine, error)
        finally:
            self.optimizers = []
            assert self.cluster_environment is not None
            assert self.accelerator is not None
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    def _close(self, engine: Engine, error: BaseException | None) -> None:
        """Close the engine; ``error`` has ended the run, and counts more than what goes wrong here."""
        module, weights = self._module, None
        num_bytes = sum(param.numel() * param.element_size() for param in module.parameters())
        stay = num_bytes <= engine.config.ram
        try:
            if stay and error is None:
                weights = dict(engine.state_dict())
            elif stay and not self.is_distributed:  # others may not come to read with this rank
                with contextlib.suppress(InfinityError):
                    weights = dict(engine.state_dict())
        finally:
            engine.__exit__(None if error is None else type(error), error, None)
        if weights is not None:
            module.load_state_dict(weights)
            module.cpu()
            return
        self._emptied = module
        if not stay:
            _log.warning(
                "the weights, %d bytes, are more than Config.ram, so the module is left without; checkpoints have them",
                num_bytes,
            )

    def _check_values(self) -> None:
        if self._emptied is self._module:
            raise EngineStateError(
                f"the {type(self._module).__name__} was left without weights when its engine was closed (they stay if "
                "they fit in Config.ram); give ckpt_path, of a checkpoint of that fit"
            )

    on_train_start = on_validation_start = on_test_start = on_predict_start = _check_values

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's."""
        with self.precision_plugin.train_step_context():
            if not self._module.automatic_optimization:
                return self._module.training_step(*args, **kwargs)
            return call_as_forward(self._module, "training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's."""
        with self.precision_plugin.val_step_context():
            return call_as_forward(self._module, "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's."""
        with self.precision_plugin.test_step_context():
            return call_as_forward(self._module, "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's."""
        with self.precision_plugin.predict_step_context():
            return call_as_forward(self._module, "predict_step", *args, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Only add gradients up: not the last backward of a step."""
        with self.engine.no_sync():
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """States are loaded into the engine."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing, while the engine keeps the weights; after it, the module's own.

        Raises:
            EngineStateError: the module was left without weights.
        """
        if self._engine is None and self._emptied is self._module:
            raise EngineStateError(
                "the module was left without weights when the engine was closed (they stay if they fit in Config.ram); "
                "the last checkpoint of the fit has them"
            )
        return self._module.state_dict() if self._engine is None else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the engine keeps it."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory with the engine's state and Lightning's; see ``checkpoints.py``.

        After the engine is closed: with ``weights_only``, a file as other strategies write it.

        Raises:
            ConfigError: there are ``storage_options``, or a remote path: the engine writes it.
            DirectoryError: something else is at ``filepath``.
            EngineStateError: there is no engine any more, and more than weights is asked for.
            StorageError: it could not be written; what was there stays.
        """
        if storage_options is not None:
            raise ConfigError("save_checkpoint(storage_options=...): not with InfinityStrategy; leave it out")
        weights_only = "optimizer_states" not in checkpoint
        if self._engine is None and weights_only:
            super().save_checkpoint(checkpoint, filepath)
            return
        checkpoints.save(
            self.engine,
            checkpoints.place_of(self.broadcast(os.fspath(filepath)), "save_checkpoint"),
            checkpoint,
            weights_only=weights_only,
            is_first=self.is_global_zero,
            agree=self.broadcast,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's part; a file of another strategy's is read as well. Code in it is never run.

        Raises:
            ConfigError: ``weights_only`` is false.
            StorageError: it is no checkpoint, or holds what only code can read.
        """
        if weights_only is False:
            raise ConfigError("ckpt_path with weights_only=False: nothing that is read is run; leave weights_only out")
        path = checkpoints.place_of(checkpoint_path, "ckpt_path")
        self._loaded_from = path
        return checkpoints.read(path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of the checkpoint that was read."""
        assert self._loaded_from is not None
        whole = bool(self.optimizers)
        checkpoints.load(self.engine, self._loaded_from, checkpoint, whole=whole, strict=strict)
        self._emptied = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state of a file of Lightning's; the engine has loaded its own."""
        if not checkpoints.holds_state(checkpoint):
            self.engine.optimizer.load_state_dict(checkpoint["optimizer_states"][0])

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove one that ``save_checkpoint`` has written."""
        if self.is_global_zero:
            checkpoints.remove(checkpoints.place_of(filepath, "remove_checkpoint"))

    # What the Trainer and Config say about the same things

    @property
    def precision_plugin(self) -> Any:
        """What leads Lightning's steps to the engine."""
        return self._precision_plugin or self._make_precision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # one that is there already, Lightning takes for the user's, and forgets what Trainer(precision=...) says
        name = None if plugin is None else name_of(plugin, self.plain_precisions)
        self._precision_plugin = None if name is None else self._make_precision(name)

    def _make_precision(self, name: str) -> Any:
        return self.precision_type(name, lambda: self.engine)

    @property
    def checkpoint_io(self) -> Any:
        """What Lightning asks to end; it writes nothing."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise ConfigError(
            f"plugins: {type(plugin).__name__} would write checkpoints that the engine writes itself; leave it out"
        )

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _only_optimizer(self) -> torch.optim.Optimizer:
        given = [each for each in self.optimizers if each.param_groups]  # Lightning has a dummy where there is none
        if len(given) != 1:
            raise ModelError(
                f"{type(self._module).__name__}.configure_optimizers(): expected one optimizer, got {len(given)}; "
                "parameters that are to be stepped otherwise can be groups of it"
            )
        return given[0]
