"""What the rows are: counts over all of them, and some of them token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anyqlora.core.redaction import redacted
from anyqlora.core.terminal import printable
from anyqlora.data import formats
from anyqlora.data.conversations import MENDED
from anyqlora.data.meanings import HARMLESS
from anyqlora.data.readers.bad_rows import BadRow
from anyqlora.data.rows import Example, Rows
from anyqlora.data.tokenizer import special_token_ids, token_texts
from anyqlora.data.turns import LEFT_OUT

FIRST = 20  # rows named for each finding
COLUMNS = 5  # named where they are not used


def statistics(examples: Sequence[Example], tokenizer) -> dict:
    """Counts over all of `examples`, JSON-able."""
    chosen = Rows.of(examples)
    lengths, trained = chosen.gather("lengths").astype(np.int64), chosen.gather("trained_tokens").astype(np.int64)
    is_cut = chosen.gather("length") > 0
    ends = {tokenizer.convert_tokens_to_ids(name): name for name in special_token_ids(tokenizer)}
    last = _AnswerEnds.of(chosen, np.array(sorted(ends), np.int64))
    return {
        "examples": len(chosen),
        "tokens": int(lengths.sum()),
        "trained_tokens": int(trained.sum()),
        "longest": int(lengths.max(initial=0)),
        "percentiles": percentiles(chosen),
        "lengths": histogram(lengths),
        "fully_masked": rows(chosen, trained == 0),
        "truncated": rows(chosen, is_cut),
        "end_tokens": {ends[id]: count for id, count in last.counts.items()},
        "without_end_token": rows(chosen, last.is_missing),
        "double_bos": rows(chosen, _begins_twice(chosen, tokenizer.bos_token_id)),
    }


@dataclass(frozen=True)
class _AnswerEnds:
    """With which tokens answers end."""

    counts: dict[int, int]  # of each special token, the commonest first
    is_missing: np.ndarray  # bool [rows]: whether a row has an answer that ends with none of them

    @classmethod
    def of(cls, chosen: Rows, special: np.ndarray) -> _AnswerEnds:
        """The ends of each run of trained tokens. `special` are tokens, sorted; a run that was cut off ends by chance:
        it is not counted.
        """
        counts, missing = Counter(), []
        wanted = [
            np.bincount(chosen.row[chosen.table == number], minlength=len(table))
            for number, table in enumerate(chosen.tables)
        ]
        for number, table in enumerate(chosen.tables):
            is_missing = np.zeros(len(table), bool)
            for batch in range(len(table.batches)):
                offsets, ids, trained = table.tokens(batch)
                start = int(table.starts[batch])
                base, limit = int(offsets[0]), int(offsets[-1])
                flags = trained[base:limit]
                following = np.append(flags[1:], False)
                following[(offsets[1:-1] - base) - 1] = False  # the next row's begin
                places = np.flatnonzero(flags & ~following)
                row = np.searchsorted(offsets - base, places, "right") - 1
                tokens = ids[base:limit][places]
                is_end = np.isin(tokens, special)
                is_missing[start + row[~is_end]] = True
                is_last = np.append(row[1:] != row[:-1], True) if len(row) else np.empty(0, bool)
                cut = table.batches[batch].column("length").to_numpy() > 0
                counted = is_end & ~(is_last & cut[row])
                weights = wanted[number][start + row[counted]]
                for token in np.unique(tokens[counted][weights > 0]).tolist():
                    counts[token] += int(weights[tokens[counted] == token].sum())
            missing.append(is_missing)
        return cls(dict(counts.most_common()), chosen.pick(missing, bool))


def _begins_twice(chosen: Rows, bos: int | None) -> np.ndarray:
    """bool [rows]: whether a row begins with the begin token and the begin token."""
    if bos is None:
        return np.zeros(len(chosen), bool)
    parts = []
    for table in chosen.tables:
        twice = np.zeros(len(table), bool)
        for batch in range(len(table.batches)):
            offsets, ids, _ = table.tokens(batch)
            has_two = np.flatnonzero(np.diff(offsets) > 1)
            first = offsets[has_two]
            twice[table.starts[batch] + has_two] = (ids[first] == bos) & (ids[first + 1] == bos)
        parts.append(twice)
    return chosen.pick(parts, bool)


def percentiles(examples: Rows) -> dict[str, int]:
    """{"p50": tokens, "p95", "p99", "max"} of rows before they are cut: so many a row has at most.

    Of texts of more than 64 characters for each token of the context the number is an estimate.
    """
    lengths = examples.gather("whole_lengths")
    return {
        name: int(np.quantile(lengths, share, method="inverted_cdf"))
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1))
        if len(lengths)
    }


def rows(chosen: Rows, which: np.ndarray) -> dict:
    """{"count": n, "first": ["file:line", ...]} of the rows for which `which` bool [rows] is true."""
    numbers = np.flatnonzero(which)
    return {"count": len(numbers), "first": [chosen.where(number) for number in numbers[:FIRST].tolist()]}


def histogram(lengths: np.ndarray) -> dict[str, int]:
    """Counts by powers of two: {"33-64": 7, ...} tokens."""
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    return {f"{2 ** (p - 1) + 1 if p else 1}-{2**p}": n for p, n in sorted(Counter(powers.tolist()).items())}


def duplicates(chosen: Rows, source: np.ndarray) -> dict:
    """Rows whose content stood in an earlier row; `source` int [tables] is the number of each table's source: the same
    file may be named twice.
    """
    keys = _short_keys(chosen)
    place = np.stack([source[chosen.table], chosen.gather("line")], 1) if len(chosen) else np.empty((0, 2), np.int64)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return rows(chosen, (place != place[first[inverse]]).any(1))


def overlap(train: Rows, held_out: Rows) -> dict:
    """Held-out rows that are trained on, too."""
    return rows(held_out, np.isin(_short_keys(held_out), _short_keys(train)))


def _short_keys(chosen: Rows) -> np.ndarray:
    """uint64 [rows]: the beginning of each row's key, which tells a million rows apart."""
    keys = np.ascontiguousarray(chosen.gather("keys"))
    return keys.view(np.uint64).reshape(len(keys), -1)[:, 0].copy() if len(keys) else np.empty(0, np.uint64)


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
    has_choice = any(
        source.get("style") == "chat" and formats.FORMATS[source["format"]].style != "chat"
        for source in report["sources"]
    )
    asks = "; --prompt_format text for plain text" if has_choice else ""
    return f"rows are written {' or '.join(styles)}{asks}"


def shortened(example: Example, tokenizer, characters: int = 160) -> str:
    """The row as the model gets it, on one line: what is trained in [[ ]], of each part its beginning and end."""

    def cut(text: str) -> str:
        text = redacted(text)  # while a secret in it is whole
        return text if len(text) <= characters else f"{text[: characters // 2]} ... {text[-characters // 2 :]}"

    return "".join(
        f"[[{cut(text)}]]" if trained else cut(text) for text, trained in token_spans(example, tokenizer)
    ).replace("\n", "\\n")


def token_spans(example: Example, tokenizer) -> Iterator[tuple[str, bool]]:
    """(text, whether it is trained) of each run of tokens of one kind, harmless to a terminal."""
    borders = [0, *(np.flatnonzero(np.diff(example.trained)) + 1).tolist(), len(example.ids)]
    for start, end in zip(borders, borders[1:], strict=False):
        yield printable(token_texts(tokenizer, example.ids[start:end].tolist())), bool(example.trained[start])
