"""What the rows are: counts over all of them, and some of them token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from anyqlora.core.terminal import printable
from anyqlora.data import formats
from anyqlora.data.conversations import MENDED
from anyqlora.data.examples import Example
from anyqlora.data.meanings import HARMLESS
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.tokenizer import special_token_ids, token_texts
from anyqlora.data.turns import LEFT_OUT

FIRST = 20  # rows named for each finding
COLUMNS = 5  # named where they are not used


def statistics(examples: list[Example], tokenizer) -> dict:
    """Counts over all of `examples`, JSON-able."""
    lengths = np.array([len(e.ids) for e in examples], np.int64)
    trained = np.array([int(e.trained[1:].sum()) for e in examples], np.int64)
    bos = tokenizer.bos_token_id
    ends = {tokenizer.convert_tokens_to_ids(name): name for name in special_token_ids(tokenizer)}
    last = [e.ids[_last(e.trained)].tolist() for e in examples]  # of each answer
    whole = [ids[:-1] if e.truncated else ids for e, ids in zip(examples, last, strict=True)]  # none that was cut off
    return {
        "examples": len(examples),
        "tokens": int(lengths.sum()),
        "trained_tokens": int(trained.sum()),
        "longest": int(lengths.max(initial=0)),
        "percentiles": percentiles(examples),
        "lengths": histogram(lengths),
        "fully_masked": rows(e for e, count in zip(examples, trained, strict=True) if not count),
        "truncated": rows(e for e in examples if e.truncated),
        "end_tokens": dict(Counter(ends[id] for ids in whole for id in ids if id in ends)),
        "without_end_token": rows(
            e for e, ids in zip(examples, last, strict=True) if not all(id in ends for id in ids)
        ),
        "double_bos": rows(e for e in examples if bos is not None and len(e.ids) > 1 and e.ids[0] == e.ids[1] == bos),
    }


def _last(trained: np.ndarray) -> np.ndarray:
    """Places of the last token of each run of trained tokens."""
    return np.flatnonzero(np.diff(trained.astype(np.int8), append=0) < 0)


def percentiles(examples: list[Example]) -> dict[str, int]:
    """{"p50": tokens, "p95", "p99", "max"} of rows before they are cut: so many a row has at most."""
    lengths = whole_lengths(examples)
    return {
        name: int(np.quantile(lengths, share, method="inverted_cdf"))
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1))
        if len(lengths)
    }


def whole_lengths(examples: list[Example]) -> np.ndarray:
    """int64 [examples]: tokens before a row was cut; of texts of more than 64 characters for each token of the context
    an estimate.
    """
    return np.array([example.length or len(example.ids) for example in examples], np.int64)


def rows(loaded) -> dict:
    """{"count": n, "first": ["file:line", ...]} of some examples."""
    where = [example.where for example in loaded]
    return {"count": len(where), "first": where[:FIRST]}


def histogram(lengths: np.ndarray) -> dict[str, int]:
    """Counts by powers of two: {"33-64": 7, ...} tokens."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {f"{2 ** (p - 1) + 1 if p else 1}-{2**p}": n for p, n in sorted(Counter(powers.tolist()).items())}


def duplicates(numbered: list[tuple[Example, int]]) -> dict:
    """Rows, each with the number of its source, whose content stood in an earlier row: the same file may be named
    twice.
    """
    first: dict[str, tuple[str, int]] = {}
    return rows(e for e, source in numbered if first.setdefault(e.key, (e.where, source)) != (e.where, source))


def overlap(train: list[Example], held_out: list[Example]) -> dict:
    """Held-out rows that are trained on, too."""
    keys = {example.key for example in train}
    return rows(example for example in held_out if example.key in keys)


def skipped(bad: list[BadRow]) -> list[dict]:
    """Rows that cannot be used, JSON-able."""
    return [{"where": row.where, "reason": row.reason} for row in bad]


def warnings(report: dict) -> list[str]:
    """What to know before these rows are trained or evaluated on, a line each.

    `report` is data_report.json, or a part of it.
    """
    passed_over = [f"{bad['where']}: {bad['reason']}" for bad in report["skipped"]]
    problems = {"rows that cannot be used and are skipped": {"count": len(passed_over), "first": passed_over}}
    for part in ("train", "held_out"):
        kind = "evaluation rows" if part == "held_out" else "rows"
        problems[f"{kind} cut to {report['context_length']} tokens"] = report.get(part, {}).get("truncated")
        problems[f"{kind} of which nothing is learned"] = report.get(part, {}).get("fully_masked")
    problems |= {
        "duplicate rows": report.get("duplicates"),
        "evaluation rows that are trained on": report.get("overlap"),
    }
    counted = [
        f"{what}: {problem['count']}, the first is {problem['first'][0]}"
        for what, problem in problems.items()
        if problem and problem["count"]
    ]
    return counted + [
        line for source in report.get("sources", []) + report.get("eval_sources", []) for line in _of_source(source)
    ]


def _of_source(source: dict) -> list[str]:
    left_out = {
        name.removesuffix(LEFT_OUT).replace("_", " "): count
        for name, count in source.items()
        if name.endswith(LEFT_OUT)
    }
    lines = [f"{note}, in {source['name']}" for note in source.get("notes", ())]
    lines += [f"{what.replace('_', ' ')}: {source[what]}, in {source['name']}" for what in MENDED if source.get(what)]
    lines += [
        f"{what} that the chat template leaves out: {count}, in {source['name']}" for what, count in left_out.items()
    ]
    columns = unused(source)
    return [*lines, f"columns that are not used: {columns}, in {source['name']}"] if columns else lines


def unused(source: dict) -> str:
    """The columns that are not used and not known to be harmless, those first that may be misspelt, then by their rows;
    "" where there are none.
    """
    info = formats.FORMATS.get(source.get("format", ""))
    optional = info.optional if info else ()
    columns = [
        (_meant(name, optional), count, name)
        for name, count in source.get("unused_columns", {}).items()
        if name.removeprefix("messages[].").lower() not in HARMLESS
    ]
    columns.sort(key=lambda column: (not column[0], -column[1]))
    named = [f"{name!r} ({count} row{'s' * (count > 1)}{likely})" for likely, count, name in columns[:COLUMNS]]
    return ", ".join(named + [f"{len(columns) - COLUMNS} more"] * (len(columns) > COLUMNS))


def _meant(name: str, columns: tuple[str, ...]) -> str:
    """What a column may have been meant to be: one of the two names begins with the other, as system_prompt and inputs
    do.
    """
    low = name.lower()
    likely = next(
        (column for column in columns if low.startswith(column) or len(low) > 2 and column.startswith(low)), None
    )
    return f"; did you mean {likely!r}?" if likely else ""


def written_as(report: dict) -> str:
    """How the rows become text, in a sentence."""
    names = {"chat": "by the chat template", "alpaca": "in Alpaca's words", "plain": "as plain text"}
    styles = dict.fromkeys(
        names.get(source["style"]) or names[formats.FORMATS[source["format"]].style]
        for source in report["sources"]
        if "style" in source
    )
    asks = "; --prompt_format text for plain text" if "by the chat template" in styles else ""
    return f"rows are written {' or '.join(styles)}{asks}"


def shortened(example: Example, tokenizer, characters: int = 160) -> str:
    """The row as the model gets it, on one line: what is trained in [[ ]], of each part its beginning and end."""

    def cut(text: str) -> str:
        return text if len(text) <= characters else f"{text[: characters // 2]} ... {text[-characters // 2 :]}"

    return "".join(
        f"[[{cut(text)}]]" if trained else cut(text) for text, trained in token_spans(example, tokenizer)
    ).replace("\n", "\\n")


def token_spans(example: Example, tokenizer) -> Iterator[tuple[str, bool]]:
    """(text, whether it is trained) of each run of tokens of one kind, harmless to a terminal."""
    borders = [0, *(np.flatnonzero(np.diff(example.trained)) + 1).tolist(), len(example.ids)]
    for start, end in zip(borders, borders[1:], strict=False):
        yield printable(token_texts(tokenizer, example.ids[start:end].tolist())), bool(example.trained[start])
