"""python -m anyqlora eval RUN: loss, perplexity and exact match of a finished run, on its own evaluation rows or on
others.
"""

from __future__ import annotations

from anyqlora.cli import arguments
from anyqlora.core.terminal import printable

USAGE = """usage: python -m anyqlora eval [RUN] [--dataset FILE] [--max_new_tokens N]
                               [--eval_batch_size N] [--exact_match true|false]
                               [--num_samples N] [--backend NAME] [--model_name BASE]
                               [--offline true] [--trust_remote_code true]

RUN is a run directory, or a name in ./runs; without it the newest finished run is
taken. Without --dataset the run's own evaluation rows are evaluated, as at its end."""
SETTINGS = (
    "dataset",
    "max_new_tokens",
    "eval_batch_size",
    "exact_match",
    "num_samples",
    "backend",
    "model_name",
    "offline",
    "trust_remote_code",
)
FORMS = {"loss": "{:.6f}", "perplexity": "{:.4f}", "exact_match": "{:.1%}"}


def main(argv: list[str]) -> int:
    if arguments.wants_help(argv):
        print(USAGE)
        return 0
    name, values = arguments.read(argv, {}, SETTINGS)

    from anyqlora.runs.finished import find_run

    run = find_run(name)
    other = values.pop("dataset", "")

    from anyqlora.reporting.console import ConsoleReporter
    from anyqlora.runs.opened import load_finetuned

    tuned = load_finetuned(run, {"num_samples": 0, **values})
    rows = run.held_out(tuned.tokenizer, other, ConsoleReporter(tuned.plan, 0).warn)
    evaluation = tuned.evaluate_examples(rows)
    print(printable(f"{run.directory}: {len(rows)} evaluation rows{f' of {other}' if other else ''}"))
    print(*table(evaluation, None if other else (run.result.get("eval") or {}).get("after")), sep="\n")
    for sample in evaluation.get("samples", []):
        print("", *(printable(f"{name:9} {sample[name]}") for name in ("prompt", "answer", "expected")), sep="\n")
    return 0


def table(evaluation: dict, then: dict | None) -> list[str]:
    """A line for each number; `then` are those of the run's end, to compare with."""
    lines = []
    for name, form in FORMS.items():
        if name in evaluation:
            line = f"{name.replace('_', ' '):12} {form.format(evaluation[name])}"
            if then and name in then:
                line += (
                    "  as at the end of the run"
                    if evaluation[name] == then[name]
                    else f"  at the end of the run {form.format(then[name])}"
                )
            lines.append(line)
    return lines
