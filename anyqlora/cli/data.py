"""python -m anyqlora data: what is trained on, token by token, and an audit of all rows."""

from __future__ import annotations

from anyqlora.config import resolve
from anyqlora.core.errors import UsageError
from anyqlora.core.terminal import printable
from anyqlora.data import audit, chat_template, dataset, tokenizer
from anyqlora.data.readers import sources
from anyqlora.planning import planner
from anyqlora.reporting.row_progress import show_rows

USAGE = """usage: python -m anyqlora data --dataset FILE --model_name MODEL [any flag of train.py] [--show N]

Shows the first N rows (default 3) as the model gets them - trained tokens in green, or in [[ ]] where the output is no
terminal - and what was found in all rows. Exit code 2 where they cannot be trained on."""
BAR = 40  # characters of the histogram's longest bar


def main(argv: list[str]) -> int:
    """Show and audit the rows that these flags name. Raises UsageError for rows that cannot be trained on."""
    from rich.console import Console

    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    show, flags = _show(argv)
    given = dict(word.removeprefix("--").split("=", 1) for word in resolve.canonical_argv(flags))
    settings = resolve.resolve(given)
    for spec, held_out in ((settings.dataset, False), (settings.eval_dataset, True)):
        for name, _ in sources.weighted(spec) if spec else ():
            is_default = not held_out and settings.dataset_is_default
            # one that is not there is told before anything is imported
            sources.files(name, held_out=held_out, offline=settings.offline, is_default=is_default)
    chat_template.requested_template(settings)
    tokens = tokenizer.load_tokenizer(
        settings.model_name, settings.trust_remote_code, settings.revision, settings.offline
    )
    chat_template.set_template(tokens, settings)
    settings, changes = planner.fitted_context_length(
        settings
    )  # what a hub model says of itself came with its tokenizer
    splits = dataset.load_data(settings, tokens, may_cut_ends=True, progress=show_rows)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for example in splits.train[:show]:
        _print_example(console, example, tokens)
    for line in [*changes, *report(splits.report)]:
        console.print(printable(line))
    return 0


def _show(argv: list[str]) -> tuple[int, list[str]]:
    """(value of --show, the other arguments)."""
    rest, show, arguments = [], "3", iter(argv)
    for word in arguments:
        if word == "--show" or word.startswith("--show="):
            show = word.partition("=")[2] or next(arguments, "")
        else:
            rest.append(word)
    if not show.isdigit():
        raise UsageError(f"--show: {show!r} is not a number of rows", where="command line")
    return int(show), rest


def _print_example(console, example, tokens) -> None:
    from rich.text import Text

    line = Text()
    for text, trained in audit.token_spans(example, tokens):
        if console.is_terminal:
            line.append(text, style="green" if trained else "dim")
        else:
            line.append(f"[[{text}]]" if trained else text)
    cut = ", truncated" if example.truncated else ""
    console.print(
        printable(f"--- {example.where}: {len(example.ids)} tokens, {int(example.trained[1:].sum())} trained{cut}"),
        style="bold",
    )
    console.print(line)


def report(audited: dict) -> list[str]:
    """The report of the data as lines of text."""
    lines = []
    for source in audited["sources"] + audited["eval_sources"]:
        counted = "".join(
            f", {count} {name.replace('_', ' ')}"
            for name, count in source.items()
            if isinstance(count, int) and name != "rows"
        )
        lines.append(
            f"{source['name']}: {source['rows']} rows, format {source.get('format', 'unknown')}, weight "
            f"{source['weight']:g}{counted}"
        )
        unused = audit.unused(source)
        lines += [f"  {note}" for note in source["notes"] + [f"columns that are not used: {unused}"] * bool(unused)]
    for name in ("train", "held_out"):
        lines += _part(name.replace("_", " "), audited[name]) if audited[name]["examples"] else []
    lines += _finding("duplicates", audited["duplicates"]) + _finding(
        "evaluation rows that are trained on", audited["overlap"]
    )
    if audited["skipped"]:
        lines.append(f"skipped: {len(audited['skipped'])}")
        lines += [f"  {bad['where']}: {bad['reason']}" for bad in audited["skipped"][: audit.FIRST]]
    return [*lines, f"identity {audited['identity']}"]


def _part(name: str, part: dict) -> list[str]:
    lines = [
        f"{name}: {part['examples']} examples, {part['tokens']} tokens, {part['trained_tokens']} of them trained, "
        f"longest {part['longest']}",
        f"  tokens of a row, before any is cut: {', '.join(f'{n} {v}' for n, v in part['percentiles'].items())}",
    ]
    lines.append(
        "  answers end with "
        + (", ".join(f"{name} ({count})" for name, count in part["end_tokens"].items()) or "no end token")
    )
    most = max(part["lengths"].values())
    lines += [
        f"  {length:>15} tokens {count:>8} {'#' * -(-count * BAR // most)}" for length, count in part["lengths"].items()
    ]
    for finding in ("fully_masked", "truncated", "without_end_token", "double_bos"):
        lines += _finding(f"  {finding.replace('_', ' ')}", part[finding])
    return lines


def _finding(name: str, finding: dict) -> list[str]:
    where = f" ({', '.join(finding['first'][:5])}{', ...' if finding['count'] > 5 else ''})" if finding["count"] else ""
    return [f"{name}: {finding['count']}{where}"]
