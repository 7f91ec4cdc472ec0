"""What becomes of each key of DeepSpeed's ``zero_optimization``."""

from __future__ import annotations

from infinity.deepspeed_json.notes import Key, honoured, not_needed, other_than, refused

_WHOLE = "units travel in one piece, and budgets bound them"
_POOLS = "the budgets size the pools"
_ORDER = "units are gathered and released along the recorded order, within hbm"
_QUANTIZED = "it changes the numbers; leave it out"
_ANY_TIME = "weights can be read and saved at any time"

_ZERO = "zero_optimization"
_PARAM = f"{_ZERO}.offload_param"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"

ZERO_KEYS: tuple[Key, ...] = (
    honoured(f"{_ZERO}.stage", "Config.stage"),
    honoured(f"{_PARAM}.device", "where parameters may live: budgets for ram, and nvme"),
    honoured(f"{_PARAM}.nvme_path", "Config.nvme, where the device is nvme"),
    not_needed(f"{_PARAM}.buffer_count", _POOLS),
    not_needed(f"{_PARAM}.buffer_size", _POOLS),
    not_needed(f"{_PARAM}.max_in_cpu", "ram bounds it, in bytes"),
    not_needed(f"{_PARAM}.pin_memory", "host memory is pinned where an accelerator is used"),
    honoured(f"{_OPTIMIZER}.device", "where optimizer states may live: budgets for ram, and nvme"),
    honoured(f"{_OPTIMIZER}.nvme_path", "Config.nvme, where the device is nvme"),
    not_needed(f"{_OPTIMIZER}.buffer_count", _POOLS),
    not_needed(f"{_OPTIMIZER}.buffer_size", _POOLS),
    not_needed(f"{_OPTIMIZER}.pin_memory", "host memory is pinned where an accelerator is used"),
    not_needed(f"{_OPTIMIZER}.pipeline", "reads, steps and writes always overlap"),
    not_needed(f"{_OPTIMIZER}.pipeline_read", "reads, steps and writes always overlap"),
    not_needed(f"{_OPTIMIZER}.pipeline_write", "reads, steps and writes always overlap"),
    not_needed(f"{_OPTIMIZER}.fast_init", "states are made where they are first stepped"),
    not_needed(f"{_OPTIMIZER}.ratio", "what fits into ram stays there, and the rest moves"),
    not_needed(f"{_OPTIMIZER}.super_offload", "steps run beside backward and forward"),
    not_needed(f"{_OPTIMIZER}.cpuadam_cores_perc", "cores are shared by compute, steps and I/O as they need them"),
    honoured(f"{_ZERO}.cpu_offload", "as offload_optimizer with device cpu"),
    honoured(f"{_ZERO}.cpu_offload_param", "as offload_param with device cpu"),
    honoured(f"{_ZERO}.cpu_offload_params", "as offload_param with device cpu"),
    not_needed(f"{_ZERO}.cpu_offload_use_pin_memory", "host memory is pinned where an accelerator is used"),
    not_needed(f"{_ZERO}.contiguous_gradients", "gradients of a unit always are"),
    not_needed(f"{_ZERO}.overlap_comm", "collectives always run beside compute"),
    not_needed(f"{_ZERO}.reduce_scatter", "gradients are always reduce-scattered; stages 0 and 1 gather them after it"),
    not_needed(f"{_ZERO}.reduce_bucket_size", _WHOLE),
    not_needed(f"{_ZERO}.use_multi_rank_bucket_allreduce", _WHOLE),
    not_needed(f"{_ZERO}.allgather_partitions", "parameters are always all-gathered"),
    not_needed(f"{_ZERO}.allgather_bucket_size", _WHOLE),
    not_needed(f"{_ZERO}.compute_grad_norm", "the norm is computed where it is asked for or clips"),
    refused(
        f"{_ZERO}.load_from_fp32_weights",
        "checkpoints always hold the fp32 master weights, and these are what is loaded; leave it out",
        asks=lambda value: not value,
    ),
    not_needed(f"{_ZERO}.elastic_checkpoint", "any number of ranks goes on from a checkpoint of any other"),
    refused(
        f"{_ZERO}.zenflow",
        "it steps with older gradients, which changes the numbers; leave it out",
        is_open=True,
    ),
    not_needed(f"{_ZERO}.sub_group_size", "Config.sub_group_bytes, which follows from ram"),
    not_needed(f"{_ZERO}.stage3_prefetch_bucket_size", _ORDER),
    not_needed(f"{_ZERO}.stage3_param_persistence_threshold", "what is small stays where hbm and ram have room"),
    not_needed(f"{_ZERO}.stage3_model_persistence_threshold", "what is small stays where hbm and ram have room"),
    not_needed(f"{_ZERO}.stage3_max_live_parameters", "hbm bounds it, in bytes"),
    not_needed(f"{_ZERO}.stage3_max_reuse_distance", _ORDER),
    not_needed(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save", _ANY_TIME),
    not_needed(f"{_ZERO}.stage3_gather_fp16_weights_on_model_save", _ANY_TIME),
    not_needed(f"{_ZERO}.stage3_module_granularity_threshold", "repeated blocks are gathered as one"),
    not_needed(f"{_ZERO}.stage3_use_all_reduce_for_fetch_params", "parameters are all-gathered in place"),
    not_needed(f"{_ZERO}.stage3_allgather_sequential", "parameters are all-gathered in place"),
    not_needed(f"{_ZERO}.prefetch_bucket_size", _ORDER),
    not_needed(f"{_ZERO}.param_persistence_threshold", "what is small stays where hbm and ram have room"),
    not_needed(f"{_ZERO}.model_persistence_threshold", "what is small stays where hbm and ram have room"),
    not_needed(f"{_ZERO}.max_live_parameters", "hbm bounds it, in bytes"),
    not_needed(f"{_ZERO}.max_reuse_distance", _ORDER),
    not_needed(f"{_ZERO}.gather_16bit_weights_on_model_save", _ANY_TIME),
    not_needed(f"{_ZERO}.module_granularity_threshold", "repeated blocks are gathered as one"),
    not_needed(f"{_ZERO}.use_all_reduce_for_fetch_params", "parameters are all-gathered in place"),
    not_needed(f"{_ZERO}.allgather_sequential", "parameters are all-gathered in place"),
    refused(
        f"{_ZERO}.ignore_unused_parameters",
        "parameters without a gradient are never an error; check param.grad in your script, and leave this out",
        asks=lambda value: not value,
    ),
    not_needed(f"{_ZERO}.legacy_stage1", "there is one implementation of all stages"),
    not_needed(f"{_ZERO}.round_robin_gradients", "gradients leave the device while backward runs"),
    not_needed(f"{_ZERO}.parameter_alignment", "every parameter begins at a multiple of 128 bytes"),
    refused(
        f"{_ZERO}.zero_hpz_partition_size",
        "a second copy of parameters on each host is not kept; shard_ranks=RANKS_OF_A_HOST has the ranks of a host "
        "share all state, so that parameters never travel between hosts",
        asks=other_than(0, 1),
    ),
    refused(f"{_ZERO}.zero_quantized_weights", _QUANTIZED),
    refused(f"{_ZERO}.zero_quantized_nontrainable_weights", _QUANTIZED),
    refused(f"{_ZERO}.zero_quantized_gradients", _QUANTIZED),
    refused(f"{_ZERO}.zeropp_loco_param", _QUANTIZED, is_open=True),
    honoured(f"{_ZERO}.mics_shard_size", "Config.shard_ranks"),
    not_needed(f"{_ZERO}.mics_hierarchical_params_gather", "ranks that share state gather among themselves only"),
    not_needed(f"{_ZERO}.memory_efficient_linear", "no module is replaced, and released weights are never kept"),
    not_needed(f"{_ZERO}.pipeline_loading_checkpoint", "checkpoints are streamed"),
    not_needed(f"{_ZERO}.override_module_apply", "no module is changed"),
    not_needed(f"{_ZERO}.log_trace_cache_warnings", "a change of order costs speed only; engine.last_step tells"),
    not_needed(f"{_ZERO}.enable_sanity_checks", "checks always run; INFINITY_DEBUG=1 poisons released memory"),
    not_needed(f"{_ZERO}.save_muon_momentum_buffer_in_memory", "what fits into ram stays there"),
    refused(
        f"{_ZERO}.leaf_module",
        "name the classes of modules that are to be gathered as one in the field units: units=('MoELayer', 'Block')",
        is_open=True,
    ),
)
