"""``open_tiers``: the memory and files of an engine, opened one on top of the other."""

from __future__ import annotations

import torch

from infinity.config import Config
from infinity.engine.budget import Plan
from infinity.engine.persistence.agreement import Ranks
from infinity.engine.persistence.resume import capacity_bytes, open_for
from infinity.engine.prefetch import Orders
from infinity.engine.resources import Resources
from infinity.engine.unit import PARAM
from infinity.io.numa import choose_placement
from infinity.store.device import AcceleratorDevice, ArenaDevice, DeviceTier, Piece
from infinity.store.nvme import NvmeTier
from infinity.store.store import TieredStore
from infinity.trace import ShardSpans


def open_tiers(
    resources: Resources,
    plan: Plan,
    config: Config,
    orders: Orders,
    transfers: ShardSpans,
    device: torch.device,
    *,
    ranks: Ranks,
    saved_bytes: int,
) -> None:
    """Open NVMe, host memory and device memory; each is in ``resources`` as soon as it is open.

    Args:
        resources: what is to be closed with the engine.
        plan: the sizes.
        config: the budgets.
        orders: what is needed when.
        transfers: told of transfers.
        device: where training computes.
        ranks: of the run, each with directories of its own.
        saved_bytes: what NVMe holds beside for steps that may be undone.

    Raises:
        DirectoryError: an NVMe path is missing, unusable or in use by another job.
        DiskFullError: the NVMe paths have no room for the state.
        StorageError: they hold a state that cannot be gone on from.
    """
    if config.nvme:
        state = resources.state = resources.loop.run(open_for(config, ranks))
        resources.nvme = resources.loop.run(
            NvmeTier.open(
                config.nvme,
                capacity_bytes=capacity_bytes(plan, config, state, saved_bytes=saved_bytes),
                backend_name=config.io_backend,
                num_threads=config.io_num_threads,
                block_bytes=config.io_block_bytes,
                weights=config.nvme_weights,
                observe=transfers,
                state=state,
                verify=config.verify,
            )
        )
    placement = choose_placement(device, config.nvme)
    store = resources.store = TieredStore(
        config.ram,
        resources.nvme,
        distance=orders.shard_distance,
        on_room=lambda: orders.look_ahead(),
        placement=placement,
        pin=device.type == "cuda",
        poison=config.debug,
    )
    tier: DeviceTier
    if device.type == "cpu":
        tier = ArenaDevice(config.hbm, store, distance=orders.unit_distance, poison=config.debug, placement=placement)
    else:
        tier = AcceleratorDevice(device, config.hbm, store, distance=orders.unit_distance, poison=config.debug)
    resources.device = tier
    transfers.add_gauge("host bytes", lambda: store.host.usage().used_bytes)
    transfers.add_gauge("device bytes", lambda: tier.usage().used_bytes)
    for unit in plan.units:
        pieces = [Piece(part.key(PARAM), part.start, part.stop) for part in unit.parts]
        tier.register(unit.index, unit.num_bytes, pieces)
