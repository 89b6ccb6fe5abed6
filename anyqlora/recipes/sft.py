"""Fine-tune a language model: flags -> plan -> data -> loop -> adapter."""

from __future__ import annotations

from anyqlora.config.schema import TrainConfig


def train(config: TrainConfig, name: str = "") -> dict:
    """One run, from its configuration to the finished adapter, in as many processes as the plan says. Returns the content of result.json.

    `name` is the directory that was found for a run without a `run_name`, where another process has found it.
    """
    from anyqlora.planning.backends import BackendManager
    from anyqlora.processes.environment import ProcessContext
    from anyqlora.recipes.launcher import launch
    from anyqlora.reporting import trackers
    from anyqlora.runs import directory

    trackers.check_trackers(config)
    world = ProcessContext.here(config)
    config = world.apply_to(config)
    with (
        directory.locate_run(config, name) if world.is_first else directory.unknown_run_directory() as found
    ):  # refuses before anything heavy is imported
        manager = BackendManager(config.backend, verbose=config.verbose)
        plan = manager.plan(config)
        plan = manager.plan(found.keep_planned(config, plan))  # a run that goes on keeps what it chose
        if plan.world_size == world.size:
            return work(found, plan, world, config)
        found.check(plan.config, plan.global_batch)
        with found.hand_over():
            return launch(config, plan, found.directory.name)


def work(found, plan, world, config: TrainConfig) -> dict:
    """What each process of a run of `config`, planned so, does: meet the others, read the rows, and train."""
    from anyqlora.data import chat_template, dataset, stream, tokenizer
    from anyqlora.models.hub import base_directory
    from anyqlora.reporting import select
    from anyqlora.training import handshake
    from anyqlora.training.follower import WorkerSession
    from anyqlora.training.session import TrainingSession

    with handshake.join_processes(plan, world) as ranks:
        plan = handshake.agree_on_plan(ranks, found, plan, config)
        select.announce_plan(plan, ranks)
        words = tokenizer.load_tokenizer(str(base_directory(plan.config)), plan.config.trust_remote_code)
        chat_template.set_template(words, plan.config)
        rows = dataset.load_data(plan.config, words)
        handshake.check_same_data(ranks, rows)
        kind = TrainingSession if ranks.is_first else WorkerSession
        with kind(found, plan, rows, stream.make_stream(plan, rows.train, ranks.rank), words, ranks) as run:
            return run.already_finished() if run.finished else LOOPS[plan.framework](run)


def torch_loop(run) -> dict:
    """Train on a torch device: CUDA, ROCm, XPU, MPS or CPU."""
    import torch

    from anyqlora.on_torch.assembly.build import build, optimizer_factory
    from anyqlora.on_torch.assembly.checks import check_gradients
    from anyqlora.on_torch.device import is_out_of_memory, seed_everything, set_deterministic
    from anyqlora.on_torch.evaluate import evaluator
    from anyqlora.on_torch.profiling.profiler import make_hooks
    from anyqlora.on_torch.runtime import Runtime
    from anyqlora.on_torch.state import finished, restore, restore_best, snapshot

    config = run.config
    set_deterministic(config.deterministic)
    seed_everything(config.seed)
    runtime = run.on_exit(Runtime(run.plan))
    memory = run.on_exit(runtime.memory)
    watched = run.on_exit(make_hooks(run, memory))  # nothing, unless profiling is asked for
    with watched.phase("load"):
        built = build(config, runtime, run.data.sample(run.plan.batch_size))
    for note in built.notes:
        run.console.warn(note)
    for line in built.news:
        run.console.info(line)
    run.check_room(sum(p.numel() for p in built.trainable.values()))
    model, *_ = runtime.prepare(built.model, built.trainable, optimizer_factory(config))
    restore(runtime, run)
    evaluation = watched.evaluation(evaluator(run, runtime.unwrap_model(model), runtime))
    if run.data.held_out and (not run.restored or run.pending_evaluation):
        run.evaluate(run.first_step, evaluation)

    def gradients(step: int, batches: list) -> float | None:
        """Accumulate the step's gradients. Returns the sum of this process's token losses, or None when memory ran out."""
        seed_everything(run.seed(step))
        trained = run.trained(step)  # of the whole step: every token weighs the same
        total = torch.zeros((), device=runtime.device)
        try:
            for number, batch in enumerate(batches, 1):
                is_final = number == len(batches)
                with runtime.micro_batch(is_final):
                    with watched.phase("forward"), runtime.forward():
                        loss = runtime.loss(model, batch, runtime.device)
                    with watched.phase("backward", is_final):
                        runtime.backward(loss / trained)
                total += loss.detach()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            run.out_of_memory(step)
            return None
        return float(total)

    for step, lr in run.steps():
        with watched.span("data"):
            batches = run.batches(step)
        while (loss := run.all_reduce_loss(step, gradients(step, batches))) is None:
            runtime.discard_step()
            batches = run.halve_micro_batch(step)
        if run.should_check_gradients(step):
            check_gradients(runtime.strategy)
        with watched.phase("step"):
            result = runtime.step(lr, config.max_grad_norm, skip=run.should_skip(loss))
        run.report(step, loss, result, lr, memory.used())
        watched.step_done()

        if run.due("evaluate", step):
            run.evaluate(step + 1, evaluation)
        if run.due("save", step):
            run.save(step + 1, lambda: snapshot(runtime, built))

    if run.ends_unevaluated:
        run.evaluate(run.last_step, evaluation)
    restore_best(runtime, run)
    sha256 = run.write_finished(*finished(runtime, built, run))
    return run.finish(sha256, memory.peak())


def mlx_loop(run) -> dict:
    """Train on MLX: Apple silicon, or MLX's builds for Linux."""
    from anyqlora.on_mlx.build import build, check_gradients
    from anyqlora.on_mlx.evaluate import evaluator
    from anyqlora.on_mlx.memory import is_out_of_memory
    from anyqlora.on_mlx.runtime import Runtime
    from anyqlora.on_mlx.state import finished, restore, restore_best, snapshot

    config = run.config
    runtime = Runtime(run.plan)
    memory = run.on_exit(runtime.memory)
    built = build(config, runtime)
    for note in built.notes:
        run.console.warn(note)
    run.check_room(sum(value.size for value in built.trainable().values()))
    runtime.prepare(built, run.process_group)
    restore(runtime, run)
    evaluation = evaluator(run, built)
    if run.data.held_out and (not run.restored or run.pending_evaluation):
        run.evaluate(run.first_step, evaluation)

    def gradients(step: int, batches: list) -> float | None:
        """Accumulate the step's gradients. Returns the sum of this process's token losses, or None when memory ran out."""
        runtime.seed(run.seed(step))
        trained = run.trained(step)  # of the whole step: every token weighs the same
        try:
            return sum(runtime.backward(batch, trained) for batch in batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            run.out_of_memory(step)
            return None

    for step, lr in run.steps():
        batches = run.batches(step)
        while (loss := run.all_reduce_loss(step, gradients(step, batches))) is None:
            runtime.discard_step()
            batches = run.halve_micro_batch(step)
        if run.should_check_gradients(step):
            check_gradients(runtime.reduced())
        result = runtime.step(lr, config.max_grad_norm, skip=run.should_skip(loss))
        run.report(step, loss, result, lr, memory.used())
        if note := memory.strained():
            run.console.warn(note)

        if run.due("evaluate", step):
            run.evaluate(step + 1, evaluation)
        if run.due("save", step):
            run.save(step + 1, lambda: snapshot(runtime, built))

    if run.ends_unevaluated:
        run.evaluate(run.last_step, evaluation)
    restore_best(runtime, run)
    sha256 = run.write_finished(*finished(runtime, built, run))
    return run.finish(sha256, memory.peak())


LOOPS = {"torch": torch_loop, "mlx": mlx_loop}
