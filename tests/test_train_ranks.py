"""``infinity train`` under torchrun: what each rank trains on, what is shown once, what is written for each."""

from __future__ import annotations

import io
import json
import math
import socket
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console

from infinity.config import Config
from infinity.console.interrupt import StopRequest
from infinity.train.data import held_out_batches, training_batches
from infinity.train.ranks import ALONE, Ranks
from infinity.train.run import run
from infinity.train.settings import TrainSettings
from launch import outputs, run_ranks

TEXT = torch.arange(10_000).remainder(251).to(torch.uint8)
FLAGS = {"layers": 1, "hidden": 16, "heads": 2, "seq": 8, "batch": 2, "accumulate": 2, "eval_every": 2, "steps": 4}


@pytest.mark.parametrize("num_skipped", [0, 3])
def test_ranks_share_the_batches_of_one_that_has_them_all(num_skipped: int) -> None:
    def first(batch_size: int, **ranks: int) -> list[torch.Tensor]:
        batches = training_batches(TEXT, batch_size=batch_size, seq_length=16, seed=5, num_skipped=num_skipped, **ranks)
        return [next(batches)[0] for _ in range(4)]

    parts = [first(3, rank=rank, num_ranks=4) for rank in range(4)]
    assert all(
        torch.equal(torch.cat(shared), whole) for shared, whole in zip(zip(*parts, strict=True), first(12), strict=True)
    )


def test_ranks_are_judged_by_other_text_each() -> None:
    def starts(batch_size: int, num_batches: int, **ranks: int) -> list[int]:
        batches = held_out_batches(TEXT, batch_size=batch_size, seq_length=1, num_batches=num_batches, **ranks)
        assert [len(tokens) for tokens, _ in batches] == [batch_size] * num_batches
        return [int(token) for tokens, _ in batches for token in tokens.flatten()]

    parts = [starts(2, 3, rank=rank, num_ranks=2) for rank in range(2)]
    assert parts[0] + parts[1] == starts(2, 6)


def test_each_rank_has_its_own_trace() -> None:
    assert ALONE.own_file(Path("a/trace.json")) == Path("a/trace.json")
    assert Ranks(rank=3, num_ranks=4).own_file(Path("a/trace.json")) == Path("a/trace.rank3.json")


RUN = """
    import contextlib, io, signal
    from pathlib import Path
    import torch.distributed as dist
    from rich.console import Console
    import infinity.train.run as runs
    from infinity.config import Config
    from infinity.console.interrupt import StopRequest
    from infinity.train.model import GPT
    from infinity.train.plain import PlainTrainer
    from infinity.train.settings import TrainSettings

    dist.init_process_group("gloo")
    directory, flags = Path(os.environ["DIRECTORY"]), json.loads(os.environ["FLAGS"])
    fetched = []

    class Trainer(PlainTrainer):
        num_steps = 0
        last_forward = None
        def __call__(self, tokens, targets):
            self.last_forward = super().__call__(tokens, targets)
            own.append([self.module.training, self.last_forward.item()])
            return self.last_forward
        def step(self):
            super().step()
            self.num_steps += 1
            if self.num_steps == stop_after and rank == 1:
                stop.signal = signal.SIGTERM
        def state_dict(self):
            weights = super().state_dict()
            class Weights(dict):
                def __getitem__(self, name):
                    fetched.append(name)
                    return super().__getitem__(name)
            return Weights(weights)

    def make(settings, config, device):
        torch.manual_seed(settings.seed)
        return Trainer(GPT(settings.shape()), learning_rate=1e-2, config=config, device=device)

    def run(config, **more):
        shown = io.StringIO()
        settings = TrainSettings(**{**flags, **more})
        console = Console(file=shown, width=120, quiet=rank != 0)
        with stop:
            report = runs.run(settings, Config(device="cpu", **config), console, stop, make_trainer=make)
        return report.as_document(), shown.getvalue()

    stop, stop_after, own = StopRequest(), 0, []
    nvme = directory / "state"
    document, shown = run(
        {"nvme": nvme}, json=directory / f"figures{rank}.json", save=directory / f"weights{rank}"
    )
    said = {"document": document, "shown": shown, "own": own, "fetched": fetched}

    stop, stop_after, own = StopRequest(), 2, []
    said["stopped"] = run({}, steps=100)[0]
    dist.barrier()
    (directory / f"said{rank}").write_text(json.dumps(said))
    dist.destroy_process_group()
"""


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{number} is {number * number % 97}. " for number in range(400)))
    flags = json.dumps({**FLAGS, "data": str(tmp_path / "text")})
    outputs(run_ranks(RUN, DIRECTORY=str(tmp_path), FLAGS=flags))
    first, other = (json.loads((tmp_path / f"said{rank}").read_text()) for rank in range(2))

    losses = [[loss for training, loss in said["own"] if training] for said in (first, other)]
    means = [(sum(losses[0][at : at + 2]) / 2 + sum(losses[1][at : at + 2]) / 2) / 2 for at in range(0, 8, 2)]
    assert first["document"]["losses"] == other["document"]["losses"] == means
    assert losses[0] != losses[1]
    held_out = [[loss for training, loss in said["own"] if not training] for said in (first, other)]
    evaluations = [(sum(held_out[0][at : at + 2]) / 2 + sum(held_out[1][at : at + 2]) / 2) / 2 for at in range(0, 6, 2)]
    assert first["document"]["eval_losses"] == other["document"]["eval_losses"] == evaluations

    assert other["shown"] == ""
    assert "training state" in first["shown"]
    assert "at most" in first["shown"]
    assert first["shown"].count("created ") == 1
    assert f"created {tmp_path / 'state'}, to be removed at the end" in first["shown"]
    assert not (tmp_path / "state").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures0.json", "said0", "said1", "text", "weights0"]
    assert json.loads((tmp_path / "figures0.json").read_text()) == first["document"]
    assert first["fetched"] == other["fetched"] != []

    ranks = first["document"]["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {rank["host"] for rank in ranks} == {socket.gethostname()}
    assert [len(rank["step_seconds"]) for rank in ranks] == [4, 4]
    assert ranks[1]["step_seconds"] == other["document"]["step_seconds"]
    tokens = 2 * 2 * 2 * 8 * 4
    assert math.isclose(first["document"]["tokens_per_second"], tokens / sum(ranks[0]["step_seconds"]))
    assert first["document"]["transport"].startswith("gloo over TCP")

    assert [len(said["stopped"]["losses"]) for said in (first, other)] == [2, 2]
    assert other["stopped"]["stopped_by"] == "SIGTERM"


COMMAND = """
    from infinity.__main__ import main
    own = json.loads(os.environ["OWN"])
    main(["train", *json.loads(os.environ["GIVEN"]), *own.get(str(rank), [])])
"""


def ended(given: list[str], own: dict[int, list[str]], script: str = COMMAND) -> list[tuple[int, list[str]]]:
    ranks = run_ranks(script, GIVEN=json.dumps(given), OWN=json.dumps(own))
    assert [rank.output for rank in ranks][1] == ""
    return [(rank.status, rank.complaints.splitlines()) for rank in ranks]


def test_an_error_of_all_ranks_is_said_once() -> None:
    (status, lines), other = ended(["--layers", "0"], {})
    assert (status, other) == (2, (2, []))
    [line] = lines
    assert line.startswith(f"error: rank 0 of 2 ({socket.gethostname()}): --layers: Input should be greater")


def test_a_flag_that_there_is_not_is_said_once() -> None:
    (status, lines), other = ended(["--bogus"], {})
    assert (status, other) == (2, (2, []))
    [line] = lines
    assert line.startswith(f"error: rank 0 of 2 ({socket.gethostname()}): No such option: --bogus")


def test_an_error_of_one_rank_is_said_once_with_its_number(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    given = ["--device", "cpu", "--nvme", str(tmp_path), "--steps", "1"]
    first, (status, lines) = ended(given, {1: ["--data", str(missing)]})
    assert (first, status) == ((2, []), 2)
    [line] = lines
    assert line.startswith(f"error: rank 1 of 2 ({socket.gethostname()}): --data: {missing} does not exist")


def test_a_rank_that_says_nothing_is_missed_by_one_of_the_others(tmp_path: Path) -> None:
    script = """
    import infinity.train.run as runs
    load = runs.load_corpus
    def load_corpus(*args, **kwargs):
        if rank == 1:
            os._exit(7)
        return load(*args, **kwargs)
    runs.load_corpus = load_corpus
    """
    (status, lines), other = ended(["--device", "cpu", "--nvme", str(tmp_path), "--steps", "1"], {}, script + COMMAND)
    assert (status, other) == (2, (7, []))
    [line] = lines
    assert line.startswith("error: rank 0 of 2, ")
    assert "another rank has ended, or closed its engine; see what it said" in line


def test_the_command_trains_as_plain_pytorch_with_all_batches(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{number} is {number * number % 97}. " for number in range(400)))
    flags = {**FLAGS, "batch": 2, "data": tmp_path / "text", "eval_every": 2}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    given += ["--device=cpu", "--hbm=1MiB", "--ram=1MiB", f"--nvme={tmp_path / 'nvme'}", "--max-grad-norm=1"]
    given += [f"--{name}={tmp_path / name}.json" for name in ("json", "trace")] + [f"--save={tmp_path / 'weights'}"]
    ranks = run_ranks(COMMAND, GIVEN=json.dumps(given), OWN="{}")
    first, other = outputs(ranks)
    assert other == ""
    assert "state on each of 2 ranks" in first
    document = json.loads((tmp_path / "json.json").read_text())

    with StopRequest() as stop:
        settings = TrainSettings(**{**flags, "batch": 4, "plain": True, "save": tmp_path / "plain"})
        plain = run(settings, Config(device="cpu", max_grad_norm=1.0), Console(file=io.StringIO()), stop).as_document()
    for name in ("losses", "eval_losses", "grad_norms"):
        assert document[name] == pytest.approx(plain[name], rel=1e-4)
    weights, expected = (safetensors.torch.load_file(tmp_path / name) for name in ("weights", "plain"))
    assert all(torch.allclose(weights[name], value, atol=1e-4) for name, value in expected.items())
    assert weights.keys() == expected.keys()

    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["ranks"][0]["collective_bytes"] == document["ranks"][1]["collective_bytes"] != {}
    names = {"json.json", "plain", "text", "trace.rank0.json", "trace.rank1.json", "weights"}
    assert {path.name for path in tmp_path.iterdir()} == names
