"""What happens to a model and its optimizer at start: they are checked, and their values move into the store."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from infinity.engine.deferred import Materializer, materialize
from infinity.engine.formats import Compute, FormatOf
from infinity.engine.precision import Precision
from infinity.engine.refusals import find_missing
from infinity.engine.shadow import is_shard
from infinity.engine.standin import StandIn
from infinity.engine.states import StateFormatOf, exact_states
from infinity.engine.substep import PartState
from infinity.engine.unit import Part, Slot, Unit, state_kind
from infinity.errors import ModelError
from infinity.store.loop import LoopThread
from infinity.store.store import TieredStore

_OWNER = "start"

Share = Callable[[str, torch.Tensor], torch.Tensor]
"""Makes a value that all ranks have in common of each one's own, by name."""


def check_model(model: object, optimizer: object) -> None:
    """Refuse what cannot be trained.

    Raises:
        ModelError: it says which parameter or module, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__}.step() needs a closure, which would evaluate the model several "
            "times per step; use an optimizer whose step() takes none"
        )
    names = {param: name for name, param in model.named_parameters()}
    if not names:
        raise ModelError(f"model: {type(model).__name__} has no parameters; there is nothing to train")
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param not in names:
                raise ModelError(
                    f"optimizer: parameter {position} of group {index}, of shape {tuple(param.shape)}, is not one of "
                    "the model's; build the optimizer from the parameters of the model that you pass, and do not move "
                    "or replace them in between"
                )
    for name, module in model.named_modules():
        _check_module(name, module)
    for param, name in names.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name} is lazy; run one forward pass before initialize()")
        if param.layout is not torch.strided:
            raise ModelError(f"parameter {name} has layout {param.layout}; expected a dense tensor")
    missing = find_missing(model)
    if missing is not None:
        raise ModelError(
            f"parameter {missing} has no values: its model is, or was until close(), under another engine; close that "
            "and load values into the model, or build it anew"
        )
    _check_memory({name: param for param, name in names.items() if not param.is_meta})


def _check_module(name: str, module: nn.Module) -> None:
    """Refuse modules that compute what hooks and placeholders cannot follow."""
    what = f"module {name}" if name else f"model {type(module).__name__}"
    if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ModelError(
            f"{what}: max_norm changes the weight in forward, which is not supported; build it without max_norm and "
            "clamp the vectors that it returns"
        )
    if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        raise ModelError(f"{what}: sparse gradients are not supported; build it with sparse=False")
    is_compiled = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    if is_compiled or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
        raise ModelError(
            f"{what} is compiled: torch.compile keeps the memory of parameters, which come and go under the engine; "
            "give infinity.initialize() the model without torch.compile() and module.compile(), and have its blocks "
            "compiled by Config(compile=True)"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{what} is TorchScript, whose forward runs without the hooks that bring its parameters; "
            "give infinity.initialize() the module that it was made from"
        )
    many = isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
    if many or isinstance(module, nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"{what}: {type(module).__name__} copies or synchronises parameters that are away; "
            "give infinity.initialize() the module inside it (.module)"
        )


def _check_memory(params: dict[str, nn.Parameter]) -> None:
    """Refuse parameters whose elements are not their own."""
    ranges = []
    for name, param in params.items():
        storage, itemsize = param.untyped_storage(), param.element_size()
        if param.numel() * itemsize > storage.nbytes():
            raise ModelError(
                f"parameter {name} is expanded: {param.numel()} elements share the memory of fewer; "
                "make it of a tensor with memory for each (.clone(memory_format=torch.contiguous_format))"
            )
        span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
        if span == param.numel():  # of others it cannot be told from a range
            ranges.append((str(param.device), param.data_ptr(), param.data_ptr() + span * itemsize, name))
    ranges.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < end:
            raise ModelError(
                f"parameters {name} and {other} share memory but are two nn.Parameter objects, so each would be kept "
                "and stepped on its own; tie them by assigning the same object to both modules"
            )


def convert_buffers(
    model: nn.Module, precision: Precision, device: torch.device, share: Share = lambda name, value: value
) -> int:
    """Bring buffers to the device in the dtype that computes; they stay there. Returns their bytes."""
    converted: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in converted:
                value = materialize(buffer) if buffer.is_meta else buffer
                full_name = f"{prefix}.{name}" if prefix else name
                value = value.to(device, precision.compute_dtype(value.dtype, full_name))
                converted[buffer] = share(full_name, value)
            module._buffers[name] = converted[buffer]
    return sum(buffer.numel() * buffer.element_size() for buffer in set(converted.values()))


class Loader:
    """Moves a model's values, and what state its optimizer already has, into the store. Runs on the training thread.

    Args:
        loop: the loop thread.
        store: where they go.
        optimizer: the user's optimizer.
        format_of: how the weights of each part are stored.
        compute: runs arithmetic off the loop.
        state_format_of: how its optimizer states are.
        stored: all parts as this rank stores them.
        share: makes a value that all ranks have in common of each one's own, by name.
    """

    def __init__(
        self,
        loop: LoopThread,
        store: TieredStore,
        optimizer: torch.optim.Optimizer,
        *,
        format_of: FormatOf,
        compute: Compute,
        stored: Sequence[Part],
        state_format_of: StateFormatOf = exact_states,
        share: Share = lambda name, value: value,
    ) -> None:
        self._loop = loop
        self._store = store
        self._stored = stored
        self._share = share
        self._optimizer = optimizer
        self._format_of = format_of
        self._state_format_of = state_format_of
        self._compute = compute
        self._materialize = Materializer()

    def load(self, units: Sequence[Unit]) -> dict[int, PartState]:
        """Store every unit, one parameter's values at a time, leaving placeholders. Returns state found by part.

        Raises:
            ModelError: a parameter on the meta device has no recorded initialisation.
            StorageError: a shard could not be written.
        """
        try:
            return {part.index: self._load_part(unit, part) for unit in units for part in unit.parts}
        finally:
            self._materialize = Materializer()  # and free what the last one has made

    def leave(self, units: Sequence[Unit]) -> None:
        """Leave placeholders, and forget all values and states: those in the store are to be used."""
        for unit in units:
            for part in unit.parts:
                for slot in part.slots:
                    self._empty(unit, part, slot)
                    self._optimizer.state.pop(slot.param, None)

    def _load_part(self, unit: Unit, whole: Part) -> PartState:
        part = self._stored[whole.index]
        weights = self._format_of(part).create(self._store, part, _OWNER)
        self._loop.run(weights.pin())
        for position, slot in enumerate(part.slots):
            value = self._materialize(slot.param) if slot.param.is_meta else slot.param.detach()
            value = slot.take(self._share(slot.name, value))
            if not weights.write(position, value):
                self._loop.run(weights.widen(self._compute))
                weights.write(position, value)
            del value
            self._empty(unit, part, slot.original)
        self._loop.run(weights.release(changed=True))
        return self.load_state(part) if part.stepped else PartState()

    def _empty(self, unit: Unit, part: Part, slot: Slot) -> None:
        """Leave a placeholder in the parameter, which stays the object that the user and the optimizer hold."""
        param = slot.param
        if param.is_meta:
            slot.stand_in = StandIn(slot.shape, part.compute_dtype, unit.device)
            real = nn.Parameter(slot.stand_in.tensor, requires_grad=param.requires_grad)
            real.__dict__.update(param.__dict__)
            torch.utils.swap_tensors(param, real)
        else:
            unit.leave(part, slot)

    def load_state(self, part: Part) -> PartState:
        """Take over state of an optimizer that has stepped, or loaded a state dict, before; no shard of it exists yet.

        Raises:
            StorageError: a shard could not be written.
        """
        state = PartState()
        found: dict[str, dict[int, torch.Tensor]] = {}
        for position, slot in enumerate(part.slots):
            for name, value in self._optimizer.state.pop(slot.param, {}).items():
                if is_shard(value, slot.original):
                    found.setdefault(name, {})[position] = slot.take(value)
                elif not slot.is_left_out:
                    state.small[position][name] = value
        for name, values in found.items():
            dtype = next(iter(values.values())).dtype
            states, key = self._state_format_of(part, dtype), part.key(state_kind(name))
            shard = self._loop.run(self._store.put(key, states.num_bytes(part), owner=_OWNER)).tensor
            for position, value in values.items():
                states.write(part, position, shard, value)
            state.shards[name] = (dtype, set(values))
            del shard
            self._loop.call_soon(functools.partial(self._store.release, key, owner=_OWNER, dirty=True))
        return state
