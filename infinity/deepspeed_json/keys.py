"""What becomes of each key of a DeepSpeed configuration, in one table; ``docs/deepspeed-keys.md`` is made of it."""

from __future__ import annotations

from infinity.deepspeed_json.notes import Key, honoured, more_than_one, not_needed, on_within, other_than, refused
from infinity.deepspeed_json.zero_keys import ZERO_KEYS

_FASTEST_WAY = "a probe of the directories finds how they are read and written best; Config.io_* say otherwise"
_DATA = "give the loader what it should yield, in your script; leave this out"
_NO_MODEL_PARALLELISM = "every rank runs the whole model, and shares its state; leave this out"
_YOUR_LOG = "log engine.last_step and the loss in your script; leave this out"
_FIGURES = "engine.last_step has the figures of each step, infinity.trace.write_trace writes them for Perfetto"


def _bf16(section: str) -> tuple[Key, ...]:
    overflow = "Config.on_nonfinite='error' stops at infinite gradients; in bf16 no step is skipped"
    return (
        honoured(f"{section}.enabled", "Config.precision='bf16'"),
        not_needed(f"{section}.immediate_grad_update", "gradients leave for their sums as soon as they are made"),
        not_needed(f"{section}.check_grad_overflow", overflow),
        not_needed(f"{section}.check_overflow", overflow),
        refused(f"{section}.bf16_master_weights_and_grads", "master weights are fp32; leave this out"),
        refused(f"{section}.bf16_optimizer_states", "give the field optimizer_states='bf16' instead"),
    )


def _all_not_needed(section: str, why: str, names: str) -> tuple[Key, ...]:
    return tuple(not_needed(f"{section}.{name}", why) for name in names.split())


KEYS: tuple[Key, ...] = (
    honoured("train_batch_size", "micro-batch x accumulation x ranks: completed from two of them, and checked"),
    honoured("train_micro_batch_size_per_gpu", "see train_batch_size"),
    honoured("gradient_accumulation_steps", "Config.accumulation_steps; see train_batch_size"),
    refused(
        "managed_gradient_accumulation",
        "the engine counts the micro-batches of a step, or your script does with infinity.initialize(); leave this out",
        asks=lambda value: not value,
    ),
    honoured("optimizer.type", "a class of torch.optim"),
    honoured("optimizer.params", "its arguments"),
    not_needed("optimizer.legacy_fusion", "optimizers are those of torch.optim"),
    honoured("scheduler.type", "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or of torch.optim"),
    honoured("scheduler.params", "its arguments"),
    honoured("gradient_clipping", "Config.max_grad_norm; 0: none"),
    honoured("communication_data_type", "Config.reduction_dtype: fp32, or the dtype that computes"),
    honoured("fp32_allreduce", "Config.reduction_dtype='fp32'"),
    not_needed("seq_parallel_communication_data_type", "there is no sequence parallelism"),
    refused("prescale_gradients", "gradients are averaged as DistributedDataParallel does; leave this out"),
    refused(
        "gradient_predivide_factor",
        "gradients are averaged as DistributedDataParallel does; leave this out",
        asks=other_than(1),
    ),
    refused(
        "gradient_allreduce_op",
        "gradients are averaged over ranks; multiply the loss by their number for a sum",
        asks=lambda value: str(value).lower() != "mean",
    ),
    refused("sparse_gradients", "gradients are dense; build embeddings with sparse=False"),
    not_needed("disable_allgather", "parameters are all-gathered in place"),
    not_needed("disable_python_gc", "Python's garbage collector is yours: gc.disable()"),
    honoured("fp16.enabled", "Config.precision='fp16'"),
    refused("fp16.auto_cast", "cast the inputs in your script: batch.half()"),
    honoured("fp16.loss_scale", "Config.loss_scale; 0: dynamic"),
    honoured("fp16.initial_scale_power", "Config.initial_loss_scale, as a power of 2"),
    honoured("fp16.loss_scale_window", "Config.loss_scale_window"),
    honoured("fp16.hysteresis", "Config.loss_scale_hysteresis"),
    refused("fp16.consecutive_hysteresis", "overflows are counted anew when the scale doubles; leave this out"),
    honoured("fp16.min_loss_scale", "Config.min_loss_scale"),
    refused("fp16.fp16_master_weights_and_grads", "master weights are fp32; leave this out"),
    *_bf16("bf16"),
    *_bf16("bfloat16"),
    refused("amp", "Apex is not used; fp16 or bf16 are what it did", is_open=True),
    refused("torch_autocast", "run the model under torch.autocast in your script", is_open=True),
    honoured("data_types.grad_accum_dtype", "Config.accumulation_dtype: fp32, or the dtype that computes"),
    refused("data_types.param_dtype", "fp16 or bf16 say in what dtype parameters compute"),
    refused("data_types.buffer_dtype", "buffers compute in the dtype of parameters; keep_fp32 names those in fp32"),
    refused(
        "data_types.keep_in_fp32_modules",
        "give the field keep_fp32, patterns of names of parameters and buffers: keep_fp32=('*norm*',)",
    ),
    not_needed("zero_allow_untested_optimizer", "any optimizer of torch.optim may step; others are refused by name"),
    not_needed("zero_force_ds_cpu_optimizer", "the optimizer is your own class, wherever its state lives"),
    *ZERO_KEYS,
    not_needed("aio.block_size", _FASTEST_WAY),
    not_needed("aio.queue_depth", _FASTEST_WAY),
    not_needed("aio.thread_count", _FASTEST_WAY),
    not_needed("aio.intra_op_parallelism", _FASTEST_WAY),
    not_needed("aio.single_submit", _FASTEST_WAY),
    not_needed("aio.overlap_events", _FASTEST_WAY),
    not_needed("aio.use_gds", "bytes go by host memory, where optimizers step"),
    not_needed("activation_checkpointing.partition_activations", "no rank has the activations of another's model"),
    not_needed(
        "activation_checkpointing.cpu_checkpointing",
        "the field activation_bytes puts activations in host memory and on nvme, within a budget",
    ),
    not_needed("activation_checkpointing.contiguous_memory_optimization", "PyTorch's allocator is enough"),
    not_needed("activation_checkpointing.number_checkpoints", "PyTorch's checkpoints need no number"),
    not_needed("activation_checkpointing.synchronize_checkpoint_boundary", "PyTorch's checkpoints need none"),
    not_needed("activation_checkpointing.profile", _FIGURES),
    honoured("steps_per_print", "how often infinity.integrations.deepspeed reports a step"),
    honoured("wall_clock_breakdown", "whether its report says where the time went"),
    honoured("dataloader_drop_last", "whether its loader leaves out what makes no whole batch"),
    not_needed("dump_state", "the report at the start has it"),
    not_needed("memory_breakdown", "engine.usage() has it at any time"),
    not_needed("log_level", "the logger is 'infinity', of Python's logging"),
    *_all_not_needed("timers.throughput", _FIGURES, "enabled synchronized"),
    *_all_not_needed(
        "flops_profiler",
        _FIGURES,
        "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    ),
    *_all_not_needed(
        "comms_logger",
        "engine.collective_bytes() has what was sent, engine.last_step the waits",
        "enabled verbose prof_all prof_ops debug",
    ),
    refused("tensorboard", _YOUR_LOG, is_open=True),
    refused("wandb", _YOUR_LOG, is_open=True),
    refused("csv_monitor", _YOUR_LOG, is_open=True),
    refused("comet", _YOUR_LOG, is_open=True),
    refused("autotuning", "python -m infinity.bench --config FILE finds the settings; leave this out", is_open=True),
    refused("compression_training", "it changes the model; leave this out", is_open=True),
    refused("weight_quantization", "it changes the model; leave this out", is_open=True),
    refused("quantize_training", "it changes the numbers; leave this out", is_open=True),
    refused("data_efficiency", _DATA, is_open=True),
    refused("curriculum_learning", _DATA, is_open=True),
    refused("progressive_layer_drop", "drop layers in your model; leave this out", is_open=True),
    refused("eigenvalue", "it serves quantization during training, which there is none of", is_open=True),
    refused("sparse_attention", "the attention is your model's; leave this out", is_open=True),
    refused("elasticity", "a run goes on with any number of ranks and the batch sizes you give it", is_open=True),
    refused("pipeline", _NO_MODEL_PARALLELISM, is_open=True),
    refused(
        "tensor_parallel",
        _NO_MODEL_PARALLELISM,
        asks=more_than_one("autotp_size", "tp.tp_size", "tensor_parallel.tp_size"),
        is_open=True,
    ),
    refused("expert_parallel", _NO_MODEL_PARALLELISM, is_open=True),
    refused("sequence_parallel_size", _NO_MODEL_PARALLELISM, asks=other_than(0, 1)),
    refused("hybrid_engine", "generate with engine.module.generate(); leave this out", is_open=True),
    refused(
        "compile",
        "give the field compile=True: blocks are then compiled",
        asks=on_within("deepcompile", "enabled"),
        is_open=True,
    ),
    refused("graph_harvesting", "the field compile=True has blocks compiled; leave this out"),
    not_needed("checkpoint.tag_validation", "ranks agree on every checkpoint before it counts"),
    not_needed("checkpoint.load_universal", "any number of ranks goes on from a checkpoint of any other"),
    not_needed("checkpoint.use_node_local_storage", "each rank keeps its state on its own disks"),
    not_needed("checkpoint.parallel_write.pipeline_stage", "all ranks write their own part at the same time"),
    not_needed("checkpoint.checkpoint_serialization", "checkpoints are safetensors, never pickles"),
    *_all_not_needed(
        "checkpoint.writer",
        _FASTEST_WAY,
        "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
    ),
    not_needed("nebula", "a commit names what is on the disk already, and costs no copy", is_open=True),
    not_needed("datastates_ckpt", "a commit names what is on the disk already, and costs no copy", is_open=True),
    not_needed("vocabulary_size", "it only warned of sizes that tensor cores do not like"),
    not_needed("use_data_before_expert_parallelism", "there is no expert parallelism"),
    not_needed("allgather_size", "units travel in one piece"),
)

KEY_OF = {key.name: key for key in KEYS}
SECTIONS = {name.rpartition(".")[0] for name in KEY_OF} - {""}
SECTIONS |= {section.rpartition(".")[0] for section in SECTIONS} - {""}


def names_in(section: str) -> list[str]:
    """The names of all that a section may hold; ``""`` for the whole document."""
    start = f"{section}." if section else ""
    return sorted({name[len(start) :].partition(".")[0] for name in KEY_OF if name.startswith(start)})
