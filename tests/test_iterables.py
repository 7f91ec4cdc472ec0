"""Loaders of every kind under commits: a resumed run goes on at the next batch, with the bits of one never stopped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import infinity
from infinity import Config, ModelError, ReplayedLoader

NUM_SAMPLES, WIDTH = 14, 8


class Samples(Dataset[torch.Tensor]):
    """As users write them: augmented by whatever generator is at hand."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.random() + float(numpy.random.rand()) + torch.rand(()).item()
        return torch.full((WIDTH,), float(index)) + noise


class Stream:
    """The protocol of ``datasets.IterableDataset``: a position, ``set_epoch``, a share of each node."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.epoch, self.position = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for number in order[self.rank :: self.num_ranks][self.position :]:
            self.position += 1
            yield torch.full((2, WIDTH), float(number))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def split_by_node(stream: Stream, rank: int, world_size: int) -> Stream:
    return Stream(rank, world_size)


class Stateless:
    """Of a library that has neither positions nor torch's names."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2, WIDTH), 10.0 * self._epoch + number) for number in range(6))


def replayed(**options: Any) -> ReplayedLoader[Any]:
    return ReplayedLoader(DataLoader(Samples(), batch_size=2, **options))


LOADERS: dict[str, Callable[[], Any]] = {
    "a stream": Stream,
    "a share of a stream": lambda: split_by_node(Stream(), 1, 2),
    "DataLoader": lambda: replayed(),
    "shuffled": lambda: replayed(shuffle=True),
    "shuffled by its own generator": lambda: replayed(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "shared by ranks": lambda: replayed(sampler=DistributedSampler(Samples(), num_replicas=2, rank=1, seed=9)),
    "another library's": lambda: ReplayedLoader(Stateless()),
}


def run(path: Path, make: Callable[[], Any], stop: int, *, through_batches: bool = True) -> dict[int, torch.Tensor]:
    """Losses by step, and the weights under 0, of a run that goes on where the one before has ended."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    path.mkdir(exist_ok=True)
    config = Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=path, durability=1, resume="auto")
    found: dict[int, torch.Tensor] = {}
    with infinity.initialize(model, optimizer, config) as engine:
        loader = make()
        engine.track("data", loader)
        for epoch in itertools.count(loader.epoch):
            if isinstance(loader, Stream):
                loader.set_epoch(epoch)
            for batch in engine.batches(loader) if through_batches else loader:
                loss = engine(batch).square().mean()
                engine.backward(loss)
                engine.step()
                found[engine.num_steps] = loss.detach().clone()
                if engine.num_steps == stop:
                    break
            if engine.num_steps == stop:
                break
        found[0] = torch.cat([value.flatten() for value in engine.state_dict().values()])
    return found


@pytest.mark.parametrize("kind", LOADERS)
def test_goes_on_at_the_next_batch(kind: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", LOADERS[kind], 17)
    parts: dict[int, torch.Tensor] = {}
    for stop in (3, 4, 7, 12, 17):  # inside of epochs, at their end (each has 7, the streams' 14, another library's 6)
        parts |= run(tmp_path / "parts", LOADERS[kind], stop)
    assert parts.keys() == whole.keys()
    assert [step for step in whole if not torch.equal(parts[step], whole[step])] == []


def test_goes_on_in_a_loop_without_batches(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Stream, 9, through_batches=False)
    parts = run(tmp_path / "parts", Stream, 4, through_batches=False)
    parts |= run(tmp_path / "parts", Stream, 9, through_batches=False)
    assert all(torch.equal(parts[step], whole[step]) for step in whole)


def test_a_loader_without_a_position_is_told_how_to_get_one(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, 1)
    config = Config(device="cpu", hbm="1MiB", ram="1MiB", nvme=tmp_path)
    with infinity.initialize(model, torch.optim.SGD(model.parameters()), config) as engine:
        with pytest.raises(
            ModelError, match=r"a DataLoader without state_dict\(\).*infinity\.ReplayedLoader\(loader\)"
        ):
            engine.track("data", DataLoader(Samples()))
        with pytest.raises(ModelError) as caught:
            engine.track("scheduler", object())
        assert "ReplayedLoader" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((number for number in range(3)), r"a generator cannot begin again, so its position cannot be kept"),
        (iter([1]), r"a list_iterator cannot begin again"),
        (Stream(), r"a Stream has a state_dict\(\) of its own; give it to engine\.track\(\)"),
        (3, r"expected a loader to iterate over, got a int"),
    ],
)
def test_what_cannot_be_replayed_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ReplayedLoader(given)


def test_other_data_than_then_is_refused_where_it_shows() -> None:
    before = ReplayedLoader([1, 2, 3, 4])
    assert list(itertools.islice(before, 3)) == [1, 2, 3]
    after = ReplayedLoader([1, 2])
    after.load_state_dict(before.state_dict())
    with pytest.raises(ModelError, match=r"epoch 0 ended after 2 batches, and the run before had 3 of it"):
        next(iter(after))


def test_epochs_and_batches_are_counted_and_a_loop_that_was_left_begins_anew() -> None:
    loader = ReplayedLoader([1, 2, 3])
    assert list(loader) == [1, 2, 3]
    assert (loader.epoch, loader.num_batches, len(loader)) == (1, 0, 3)
    assert next(iter(loader)) == 1
    assert (loader.epoch, loader.num_batches) == (1, 1)
    assert list(loader) == [1, 2, 3]


def test_each_epoch_is_told_its_number() -> None:
    loader = ReplayedLoader(Stateless())
    assert [[int(batch[0, 0]) for batch in loader] for _ in range(2)] == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    again = ReplayedLoader(Stateless())
    again.load_state_dict({**loader.state_dict(), "epoch": 3})
    assert int(next(iter(again))[0, 0]) == 30
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Samples(), num_replicas=2, rank=0)
    list(ReplayedLoader(DataLoader(Samples(), sampler=sampler)))
    shared = ReplayedLoader(DataLoader(Samples(), sampler=sampler))
    list(shared)
    list(shared)
    assert sampler.epoch == 1
