"""Loaders of micro-batches, each rank its own share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from infinity.engine.meeting import Place
from infinity.errors import ConfigError, ModelError


class DeepSpeedDataLoader(DataLoader[Any]):
    """What ``initialize(training_data=...)`` returns: micro-batches of this rank.

    Samples of a dataset with a length are divided among ranks and drawn in another order in every epoch, the same in
    every run. One that is only iterated over gives each rank what it yields there: divide it yourself.
    """

    _epoch = 0

    def __iter__(self) -> Any:
        """The next epoch."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(self._epoch)
        self._epoch += 1
        return super().__iter__()


class RepeatingLoader:
    """Batches without end: a loader that has ended begins again.

    Args:
        loader: can be iterated over again and again.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ModelError("RepeatingLoader: the loader has no batch, so it cannot be repeated") from None


def load_micro_batches(
    dataset: Dataset[Any],
    batch_size: int | None,
    where: Place,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Sampler[Any] | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DeepSpeedDataLoader:
    """A loader of one rank's micro-batches.

    Args:
        dataset: of torch, with a length or only iterable.
        batch_size: of a micro-batch.
        where: this rank.
        collate_fn: makes a batch of samples.
        sampler: chooses them; ``None``: each rank its share, in a random order.
        shuffle: whether that order is random.
        drop_last: leave out what makes no whole batch.
        num_workers: processes that load.
        pin_memory: for copies to an accelerator.

    Raises:
        ConfigError: there is no batch size.
        ModelError: ``dataset`` is none.
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) and not isinstance(
        dataset, IterableDataset
    ):
        raise ModelError(f"training_data: expected a torch Dataset, got a {type(dataset).__name__}")
    if batch_size is None:
        raise ConfigError(
            "training_data: the size of micro-batches is not known; give train_micro_batch_size_per_gpu, or "
            "train_batch_size and gradient_accumulation_steps, in the DeepSpeed configuration"
        )
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(
            dataset, num_replicas=where.num_ranks, rank=where.rank, shuffle=shuffle, drop_last=drop_last
        )
    return DeepSpeedDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
