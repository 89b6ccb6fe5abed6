"""Supervised fine-tuning: the loop, whole and once, for torch and MLX, and the way to it from a configuration.

train       one process finds the run, consults the table, makes the plan; starts the others, or goes on itself
work        each process meets the others, reads the rows, and trains
train_loop  the loop
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from anyqlora.config.schema import TrainConfig
from anyqlora.core import registry

if TYPE_CHECKING:
    from anyqlora.processes.environment import ProcessContext
    from anyqlora.runs.directory import RunDirectory
    from anyqlora.training.engine import Engine
    from anyqlora.training.session import TrainingSession

# What each function needs is imported in it: a run is refused before anything heavy is imported.


def train(config: TrainConfig, name: str = "") -> dict:
    """One run, from its configuration to the finished adapter, in as many processes as the plan says.

    Returns the content of result.json and `directory`, the run directory.

    `name` is the directory that was found for a run without a `run_name`, where another process has found it.
    """
    from anyqlora.planning.backends import BackendManager
    from anyqlora.processes.environment import ProcessContext
    from anyqlora.recipes.launcher import launch
    from anyqlora.reporting import trackers
    from anyqlora.runs import directory

    trackers.check_trackers(config)
    context = ProcessContext.here(config)
    config = context.apply_to(config)
    with directory.locate_run(config, name) if context.is_first else directory.unknown_run_directory() as run_directory:
        manager = BackendManager(config.backend, config.verbose, where=config.sources.get("backend", ""))
        plan = manager.plan(config)
        plan = manager.plan(run_directory.keep_planned(config, plan))  # a run that goes on keeps what it chose
        if plan.world_size == context.size:
            result = work(run_directory, plan, context, config)
            return {**result, "directory": str(run_directory.directory)} if context.is_first else result
        run_directory.check(plan.config, plan.global_batch)
        with run_directory.hand_over():
            result = launch(config, plan, run_directory.directory.name)
            return {**result, "directory": str(run_directory.directory)}


def work(run_directory: RunDirectory, plan, context: ProcessContext, config: TrainConfig) -> dict:
    """What each process of a run of `config`, planned so, does: meet the others, read the rows, and train."""
    from anyqlora.core.plugin_errors import named_plugin_errors
    from anyqlora.data import chat_template, dataset, stream, tokenizer
    from anyqlora.models.hub import base_directory
    from anyqlora.reporting import select
    from anyqlora.training import handshake
    from anyqlora.training.session import TrainingSession

    with named_plugin_errors(registry.plugins(plan)), handshake.join_processes(plan, context) as process_group:
        plan = handshake.agree_on_plan(process_group, run_directory, plan, config)
        select.announce_plan(plan, process_group)
        tokenizer_ = tokenizer.load_tokenizer(str(base_directory(plan.config)), plan.config.trust_remote_code)
        chat_template.set_template(tokenizer_, plan.config)
        data = dataset.load_data(plan.config, tokenizer_, progress=select.row_progress(plan, process_group))
        handshake.check_same_data(process_group, data)
        rows = stream.make_stream(plan, data.train, process_group.rank)
        with TrainingSession(run_directory, plan, data, rows, tokenizer_, process_group) as session:
            if session.is_finished:
                return session.outputs.report_finished()
            return train_loop(session, registry.load(registry.ENGINES[plan.framework]))


def train_loop(session: TrainingSession, make_engine: Callable[[TrainingSession], Engine]) -> dict:
    """Fine-tune: the engine computes on its framework, the session knows what comes next and what the processes agree
    on.
    """
    engine, evaluations = make_engine(session), session.evaluations
    with engine.phase("load"):
        loaded = engine.load(session.data.sample(session.plan.batch_size))
    session.announce(loaded)
    if start := session.starting_point():
        engine.restore(start)
    evaluator = engine.evaluator(session)
    if evaluations.comes_first:
        session.evaluate(session.first_step, evaluator)

    for step, lr in session.steps():
        with engine.span("data"):
            batches = session.batches(step)
        seed, trained_tokens = session.seed(step), session.trained_tokens(step)
        while (
            loss := session.all_reduce_loss(step, engine.gradients(batches, seed, trained_tokens))
        ) is None:  # out of memory
            engine.discard_step()
            batches = session.halve_micro_batch(step)
        if session.should_check_gradients(step):
            engine.check_gradients()
        with engine.phase("step"):
            result = engine.step(lr, session.config.clip_norm, skip=session.should_skip(loss))
        session.report(step, loss, result, lr, engine.used_memory())
        for note in engine.step_done():
            session.console.warn(note)

        if session.due("evaluate", step):
            session.evaluate(step + 1, evaluator)
        if session.due("save", step):
            session.save(step + 1, engine.snapshot)

    if evaluations.comes_last:
        session.evaluate(session.last_step, evaluator)
    if best := session.best_adapter():
        engine.load_trainable(best)
    final = engine.final_files(session.stopping_tokenizer(), session.outputs.pretrained_files)
    return session.finish(final, engine.peak_memory())
