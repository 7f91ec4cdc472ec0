"""What ``TrainingArguments`` and ``Config`` say of one thing, brought together; what cannot be is refused by name."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from infinity.config import Config
from infinity.errors import ConfigError

_logger: Any = logging.get_logger(__name__)

_OPTIMIZERS = {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}

REFUSED: dict[str, str] = {
    "deepspeed": "infinity takes the place of DeepSpeed; what its JSON says, Config.from_deepspeed reads",
    "fsdp": "infinity takes the place of FSDP; Config.stage says what ranks divide among them",
    "parallelism_config": "there is no tensor, context or sequence parallelism under infinity",
    "torch_compile": "it would compile the hooks that bring parameters; Config(compile=True) compiles the blocks",
    "fp16_full_eval": "the model cannot be converted under the engine; evaluation computes in Config.precision",
    "bf16_full_eval": "the model cannot be converted under the engine; evaluation computes in Config.precision",
    "use_liger_kernel": "it exchanges modules of a model that is under the engine; apply it to the model before",
    "auto_find_batch_size": "what has no room on the device is found by a failure in the middle of a step; set "
    "per_device_train_batch_size",
    "push_to_hub": "nothing is uploaded while training; save with trainer.save_model('model') and upload that "
    "directory: hf upload NAME model",
    "ddp_broadcast_buffers": "buffers are those of rank 0 at the start, and each rank's own from then on; leave it out",
}
"""What cannot be honoured, whatever else is said: the argument, why, and what to do."""

NOT_NEEDED: dict[str, str] = {
    "ddp_find_unused_parameters": "a parameter without a gradient is not stepped, whether it was announced or not",
    "ddp_bucket_cap_mb": "gradients are summed unit by unit, within the budgets",
    "ddp_static_graph": "nothing is assumed about the graph",
}
"""What changes nothing: the argument, and why."""


def settle(args: TrainingArguments, config: Config) -> Config:
    """The configuration of the engine under a trainer.

    Args:
        args: the trainer's.
        config: the user's.

    Raises:
        ConfigError: an argument cannot be honoured, or says otherwise than the configuration; both are named.
    """
    _refuse(args, config)
    for name, why in NOT_NEEDED.items():
        if getattr(args, name, None) is not None:
            _logger.warning_once(f"TrainingArguments({name}=…) has nothing to do under infinity: {why}")
    changes: dict[str, Any] = {}
    if args.use_cpu and config.device == "auto":
        changes["device"] = "cpu"
    max_grad_norm = float(args.max_grad_norm or 0.0)
    if config.max_grad_norm is not None and config.max_grad_norm != max_grad_norm:
        raise ConfigError(
            f"max_grad_norm: TrainingArguments say {max_grad_norm} and Config says {config.max_grad_norm}; leave it "
            "out of Config"
        )
    if config.accumulation_steps is not None:
        if config.accumulation_steps not in (1, args.gradient_accumulation_steps):
            raise ConfigError(
                f"accumulation_steps: Config says {config.accumulation_steps} and TrainingArguments say "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}; give 1 to have steps begin under the "
                "last backward, or leave it out of Config"
            )
        changes["accumulation_steps"] = 1  # the loop runs all others in no_sync()
        changes["max_grad_norm"] = max_grad_norm or None  # such a step must know before it begins
    return config.model_copy(update=changes)


def _refuse(args: TrainingArguments, config: Config) -> None:
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments({name}=…) is not supported: {why}")
    if getattr(args, "save_safetensors", True) is False:  # transformers 4
        raise ConfigError("TrainingArguments(save_safetensors=False) is not supported: weights are saved so only")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim not in _OPTIMIZERS:
        raise ConfigError(
            f"TrainingArguments(optim={optim!r}) is not supported: it is made for parameters that stay in device "
            f"memory; expected one of {', '.join(sorted(_OPTIMIZERS))}, or give the trainer an optimizer of your own "
            "with optimizers=(optimizer, None)"
        )
    if args.use_cpu and config.device not in ("auto", "cpu"):
        raise ConfigError(f"device: TrainingArguments say use_cpu=True and Config says {config.device!r}; give one")
    if args.gradient_checkpointing and config.recompute:
        raise ConfigError(
            "gradient_checkpointing and Config(recompute=True) are two ways to the same; each block would be computed "
            "three times. Give one of them"
        )
    if config.on_nonfinite == "rollback":
        raise ConfigError(
            "Config(on_nonfinite='rollback') is not supported by the trainer, whose own counters would not go back; "
            "use 'error', and resume from the last checkpoint"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"this process sees {args.n_gpu} accelerators, and a trainer with one process would copy the model to all "
            f"of them; start a process for each (torchrun --nproc-per-node {args.n_gpu} …), or make one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
