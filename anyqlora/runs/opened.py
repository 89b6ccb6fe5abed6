"""A finished run, opened by the framework that computes it here."""

from __future__ import annotations

from anyqlora.core import registry
from anyqlora.runs.finished import FinishedRun, plan_here


def load_finetuned(run: FinishedRun, changed: dict):
    """What answers and evaluates: on_torch's or on_mlx's Tuned. `changed` settings (backend, model_name, max_new_tokens ...) take the place of
    the run's own. Raises UsageError for a base or a backend that is not here and for an adapter that does not fit the base."""
    plan = plan_here(run, changed)
    return registry.load(registry.OPENED[plan.framework])(run, plan)
