"""One training run: everything but the arithmetic, and the same with infinity and without it.

Under ``torchrun`` each rank runs this with batches of its own. Rank 0 shows and writes; what decides the course (the
loss, a request to stop) is exchanged, so that all go the same way.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import AbstractContextManager, ExitStack

import torch
from rich.console import Console

from infinity.config import Config
from infinity.console.directories import nvme_directories
from infinity.console.formats import format_bytes
from infinity.console.interrupt import StopRequest
from infinity.console.output import STANDARD_OUTPUT, check_output, write_json
from infinity.errors import InfinityError, MicroBatchError
from infinity.rank_paths import nvme_for_rank
from infinity.trace import Recorder, write_trace
from infinity.train.data import Batch, Corpus, held_out_batches, load_corpus, training_batches
from infinity.train.failures import memory_errors, refuse_divergence
from infinity.train.foretold import Foretold, foretell
from infinity.train.history import History
from infinity.train.live import Display
from infinity.train.ranks import ALONE, Ranks, open_ranks
from infinity.train.report import RunReport, peak_accelerator_bytes, peak_rss_bytes, rank_documents
from infinity.train.save import check_save, save_weights
from infinity.train.settings import TrainSettings
from infinity.train.sizes import summary_table
from infinity.train.state import KeptState
from infinity.train.trainer import MakeTrainer, Trainer, deterministic_kernels, make_trainer, parameter_shapes


def run(
    settings: TrainSettings,
    config: Config,
    console: Console,
    stop: StopRequest,
    make_trainer: MakeTrainer = make_trainer,
) -> RunReport:
    """Train as told, show it on ``console``, and write what was asked for.

    Args:
        settings: what to train, on what, how long.
        config: where its state may live.
        console: where a person looks.
        stop: entered by the caller.
        make_trainer: makes what trains.

    Returns:
        The figures of the run; the same on all ranks.

    Raises:
        DivergedError: a loss was NaN or infinite; the figures up to there have been written, the weights have not.
        InfinityError: something asked for cannot be done; whatever was opened has been closed.
        KeyboardInterrupt: ``stop`` was asked twice; the same holds.
    """
    with open_ranks(config.torch_device(), timeout_seconds=config.ranks_timeout_seconds) as ranks:
        return _run(settings, config, console, stop, make_trainer, ranks)


def _run(
    settings: TrainSettings,
    config: Config,
    console: Console,
    stop: StopRequest,
    make_trainer: MakeTrainer,
    ranks: Ranks,
) -> RunReport:
    _check_files(settings, ranks)
    device = ranks.device or config.torch_device()
    corpus = load_corpus(settings.data, limit_bytes=settings.data_limit, seq_length=settings.seq_length)
    with ExitStack() as stack:
        display = stack.enter_context(Display(console, num_steps=settings.num_steps, stop=stop))
        _say_corpus(display, corpus)
        if not settings.plain:
            stack.enter_context(_directories(config, display, ranks))
        stack.enter_context(deterministic_kernels(device))
        stack.enter_context(memory_errors(settings, config))
        trainer = make_trainer(settings, config, device)
        stack.callback(trainer.close)
        stack.callback(stop.shield)
        _say_trainer(display, trainer, settings, config)
        recorder = trainer.recorder
        if recorder is not None:
            recorder.keep_steps = settings.num_trace_steps
        state = KeptState(trainer, settings, config)
        history = train(trainer, corpus, settings, device, display, stop, state, ranks)
        kept = state.keep(history)
        saved = settings.save if history.diverged_at is None else None
        if saved is not None:
            size_bytes = save_weights(saved, trainer.state_dict(), parameter_shapes(settings), writes=ranks.speaks)
            display.say(f"weights after step {history.num_steps}: {saved}, {format_bytes(size_bytes)}")
        report = RunReport(
            num_parameters=trainer.num_parameters,
            state_bytes=trainer.state_bytes,
            num_skipped_steps=trainer.num_skipped_steps,
            unit_names=trainer.unit_names,
            usage=trainer.usage(),
            history=history,
            peak_rss_bytes=peak_rss_bytes(),
            peak_accelerator_bytes=peak_accelerator_bytes(device),
            stopped_by=None if stop.signal is None else stop.signal.name,
            saved=saved,
            settings=settings,
            config=config,
            commit=state.as_document(),
            ranks=rank_documents(ranks, trainer, history, peak_rss_bytes(), peak_accelerator_bytes(device)),
            transport=ranks.transport,
        )
    report = dataclasses.replace(report, foretold=_foretold(report, device, ranks))
    console.print(report.as_table())
    if kept is not None:
        display.say(kept)
    elif settings.save is None and history.diverged_at is None:
        display.say("weights were not saved: this run keeps no checkpoint (--save FILE.safetensors writes them)")
    if settings.json_file is not None and ranks.speaks:
        write_json(report.as_document(), settings.json_file)
    if settings.trace_file is not None and recorder is not None:
        trace_file = ranks.own_file(settings.trace_file)
        write_trace(trace_file, recorder.steps)
        others = f", and one for each of {ranks.num_ranks} ranks" if ranks.num_ranks > 1 else ""
        display.say(f"trace: {trace_file}, {_steps_in(recorder)}{others}; open it with ui.perfetto.dev")
    refuse_divergence(history, settings)
    return report


def train(
    trainer: Trainer,
    corpus: Corpus,
    settings: TrainSettings,
    device: torch.device,
    display: Display,
    stop: StopRequest,
    state: KeptState,
    ranks: Ranks = ALONE,
) -> History:
    """Take all steps that are left, or as many as ``stop`` lets begin, with evaluations before, between and after.

    Returns:
        The figures of the steps that were taken, those of a run that was resumed included.
    """
    batch_size, seq_length = settings.batch_size, settings.seq_length
    held_out = held_out_batches(
        corpus.held_out,
        batch_size=batch_size,
        seq_length=seq_length,
        num_batches=settings.num_eval_batches,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
    )
    batches = training_batches(
        corpus.train,
        batch_size=batch_size,
        seq_length=seq_length,
        seed=settings.seed,
        num_skipped=state.step * settings.num_micro_batches,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
    )
    history = History(tokens_per_step=ranks.num_ranks * settings.num_micro_batches * batch_size * seq_length)
    if resumed := state.take_up(history):
        display.say(resumed)
    for step in range(state.step, settings.num_steps + 1):
        if step > state.step:
            started = time.perf_counter()
            micro_batches = [_to(device, next(batches)) for _ in range(settings.num_micro_batches)]
            for group in trainer.optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(step)
            history.losses.append(ranks.mean(train_step(trainer, micro_batches), f"adding up losses of step {step}"))
            history.step_seconds.append(time.perf_counter() - started)
            if trainer.grad_norm is not None:
                history.grad_norms.append(float(trainer.grad_norm))
            if trainer.last_step is not None:
                history.note_stats(trainer.last_step)
        is_due = settings.eval_every and (step % settings.eval_every == 0 or step == settings.num_steps)
        if is_due and step not in history.eval_steps:
            loss = evaluate(trainer, [_to(device, batch) for batch in held_out], stop, ranks)
            if loss is not None:
                history.eval_steps.append(step)
                history.eval_losses.append(loss)
        history.note_divergence()
        display.update(history, trainer.usage())
        if ranks.any(stop, f"ending step {step}") or history.diverged_at is not None:
            break
    return history


def train_step(trainer: Trainer, micro_batches: list[Batch]) -> float:
    """One optimizer step over several micro-batches, each loss divided by their number.

    Returns:
        The mean loss.
    """
    losses: list[torch.Tensor] = []

    def part_of_loss(micro_batch: Batch) -> torch.Tensor:
        loss = trainer(*micro_batch)
        losses.append(loss.detach())
        return loss / len(micro_batches)

    failure: BaseException | None = None
    try:
        trainer.accumulate(micro_batches, part_of_loss)
    except MicroBatchError as error:
        failure = error.__cause__  # its type says what to change
    if failure is not None:
        raise failure
    trainer.step()
    return sum(loss.item() for loss in losses) / len(losses)


def evaluate(trainer: Trainer, batches: list[Batch], stop: StopRequest, ranks: Ranks = ALONE) -> float | None:
    """The mean loss over all ranks' ``batches``, without gradients; ``None`` if ``stop`` came before the end."""
    trainer.module.eval()
    losses = []
    with torch.no_grad():
        for tokens, targets in batches:
            if ranks.any(stop, "evaluating"):
                break
            losses.append(trainer(tokens, targets).item())
    trainer.module.train()
    return ranks.mean(sum(losses) / len(losses), "adding up held-out losses") if len(losses) == len(batches) else None


def _foretold(report: RunReport, device: torch.device, ranks: Ranks) -> Foretold | str | None:
    """What a plan says of the run; in words why it says nothing, rather than to end a run that went well."""
    try:
        return foretell(report.settings, report.config, report.history, report.state_bytes, device, ranks.num_ranks)
    except InfinityError as error:
        return f"cannot be planned: {error}"


def _check_files(settings: TrainSettings, ranks: Ranks) -> None:
    """Refuse files that could not be written at the end, before any work is done."""
    if settings.trace_file is not None:
        check_output(ranks.own_file(settings.trace_file), "--trace", replaced=False)
    if not ranks.speaks:
        return
    if settings.json_file is not None and settings.json_file != STANDARD_OUTPUT:
        check_output(settings.json_file, "--json", replaced=False)
    if settings.save is not None:
        check_save(settings.save)


def _directories(config: Config, display: Display, ranks: Ranks) -> AbstractContextManager[None]:
    """Those given to ``--nvme``, and this rank's own in them, unless it is named in the path."""
    own = ranks.own_paths(config)
    given = nvme_for_rank(config, ranks.rank, 1, ranks.local_rank, ranks.host).nvme
    return nvme_directories(
        list(dict.fromkeys([*given, *own])),
        display.say,
        kept=config.durability != "off",
        share=lambda created: ranks.on_this_host(created, "telling each other which directories were created"),
    )


def _to(device: torch.device, batch: Batch) -> Batch:
    tokens, targets = batch
    return tokens.to(device), targets.to(device)


def _steps_in(recorder: Recorder) -> str:
    """Which steps a trace shows."""
    steps = [each.step for each in recorder.steps]
    if not steps:
        return "without a step, since none was completed"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _say_corpus(display: Display, corpus: Corpus) -> None:
    limit = "; the rest is over --data-limit" if corpus.truncated else ""
    display.say(
        f"text: {corpus.source}, {corpus.num_files} files: {format_bytes(len(corpus.train))} to train on, "
        f"{format_bytes(len(corpus.held_out))} held out{limit}"
    )


def _say_trainer(display: Display, trainer: Trainer, settings: TrainSettings, config: Config) -> None:
    where = "in memory, without infinity"
    if not settings.plain:
        budget_bytes = config.hbm + config.ram
        where = (
            f"{trainer.state_bytes / budget_bytes:.1f} times what the device ({format_bytes(config.hbm)}) and the host "
            f"({format_bytes(config.ram)}) may hold"
        )
    summary = trainer.summary()
    if summary is not None:
        display.show(summary_table(summary))
    display.say(
        f"model: {settings.num_layers} layers of {settings.hidden_size}, {trainer.num_parameters:,} "
        f"parameters; training state {format_bytes(trainer.state_bytes)}, {where}"
    )
