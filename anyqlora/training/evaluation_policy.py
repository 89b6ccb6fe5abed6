"""When the evaluation rows are evaluated and what follows from it: the best step, early stopping, what the run ends
with.
"""

from __future__ import annotations

from collections.abc import Callable

from anyqlora.config.schema import TrainConfig
from anyqlora.training.outputs import NullOutputs, RunOutputs
from anyqlora.training.signals import Interrupted
from anyqlora.training.state import TrainState, is_better

NOTHING_GAINED = (
    "the evaluation loss was {before:.4f} before step 1 and is {after:.4f} after step {step}: on rows that it was not "
    "trained on "
    "the model is no better than it was; a lower --learning_rate, fewer epochs, or --load_best_model_at_end true with "
    "--eval_steps may help"
)


class EvaluationPolicy:
    """Follows the evaluations of a run in its `state`.

    `final` is the evaluation of what the run ends with, as far as there is one.
    """

    def __init__(
        self,
        config: TrainConfig,
        state: TrainState,
        outputs: RunOutputs | NullOutputs,
        has_held_out: bool,
        is_resumed: bool,
    ):
        self.config, self.state, self.outputs = config, state, outputs
        self.has_held_out, self.is_resumed = has_held_out, is_resumed
        self.first_step, self.final = state.step, state.after
        self.keeps_best = config.load_best_model_at_end
        if self.keeps_best and state.best and not outputs.has_checkpoint(state.best_saved):
            # Nobody asked for it before, or the checkpoint is damaged: it is none that the run can end with.
            outputs.console.warn(
                f"the best step so far, {(state.best_saved or state.best)['step']}, has no checkpoint: another is "
                f"looked for "
                "from here on"
            )
            state.best_saved = None

    @property
    def comes_first(self) -> bool:
        """Whether an evaluation comes before the first step: of a new run, or one that a signal has dropped."""
        return self.has_held_out and (not self.is_resumed or self.state.pending_evaluation)

    @property
    def comes_last(self) -> bool:
        """Whether the evaluation rows have not seen the last step yet."""
        return self.has_held_out and (self.final is None or self.final["step"] != self.state.step)

    @property
    def stops_early(self) -> bool:
        return 0 < self.config.early_stopping_patience <= self.state.without_improvement

    def due(self, done: int, is_last: bool) -> bool:
        """Whether one comes after `done` finished steps; the one after the last step is `comes_last`."""
        return self.has_held_out and not is_last and self.config.eval_steps > 0 and done % self.config.eval_steps == 0

    def evaluate(self, step: int, evaluator: Callable[[], dict]) -> None:
        """Evaluate after `step` finished steps; keeps the best and counts towards early stopping.

        A signal drops the evaluation: in the loop the checkpoint then says that it comes first.
        """
        state = self.state
        try:
            result = evaluator()
        except Interrupted:
            state.pending_evaluation = True
            return
        state.pending_evaluation = False
        samples = result.get("samples", [])
        numbers = {name: value for name, value in result.items() if name != "samples"}
        self.outputs.write_evaluation({"step": step, "event": "evaluation", **numbers}, samples)
        if step == 0:
            state.before = numbers
            return
        self.final = state.after = {"step": step, **numbers}
        state.evaluated(self.final)
        if step == self.first_step:  # its checkpoint is what the run goes on from
            state.best_saved = self.best_with_checkpoint(step)
        if self.stops_early:
            self.outputs.console.info(f"stopping early: {state.without_improvement} evaluations without improvement")

    def best_with_checkpoint(self, step: int) -> dict | None:
        """The best evaluation whose step has a checkpoint, once `step` has one."""
        is_best = self.final and self.final["step"] == step and is_better(self.final, self.state.best_saved)
        return self.final if is_best else self.state.best_saved

    def earlier_best(self) -> dict | None:
        """The evaluation of the step that `load_best_model_at_end` ends with, where that is not the last step."""
        best = self.state.best_saved if self.keeps_best else None
        is_earlier = best and self.final and best["step"] != self.state.step and not is_better(self.final, best)
        return best if is_earlier else None

    def warn_if_nothing_gained(self) -> None:
        """A falling training loss does not tell."""
        before, after = self.state.before, self.final
        if before and after and not is_better(after, before):
            self.outputs.console.warn(
                NOTHING_GAINED.format(before=before["loss"], after=after["loss"], step=after["step"])
            )
