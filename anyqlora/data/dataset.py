"""From a configuration to batches: rows are read, tokenised and masked once; the batch at a step is a function of the
seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.data import audit, chat_template, examples
from anyqlora.data.packing import shuffled
from anyqlora.data.rows import Example, Rows
from anyqlora.data.stream import Batch, make_batches
from anyqlora.data.token_cache import Progress, TokenCache, no_progress
from anyqlora.models import architectures


@dataclass(frozen=True)
class DataSplits:
    """Everything a run reads."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    report: dict  # JSON-able
    identity: str  # sha256 of all tokens and masks, in order
    news: list[str] = field(default_factory=list)  # worth a line
    notes: list[str] = field(default_factory=list)  # worth a warning

    def sample(self, batch_size: int, tokens: int = 1024) -> list[Batch]:
        """The first training rows, as many as have so many tokens together."""
        lengths = np.cumsum([len(row.ids) for row in self.train[:tokens]])
        return make_batches(self.train[: 1 + int(np.searchsorted(lengths[:-1], tokens))], batch_size, 0)


def load_data(
    config: TrainConfig, tokenizer, *, may_cut_ends: bool = False, progress: Progress | None = None
) -> DataSplits:
    """Read, check, tokenise and mask everything that `config` names.

    Raises UsageError with up to 20 bad rows, each as file:line[:col], reason and cure; with on_bad_row skip they are in
    the report. `may_cut_ends`: also where most answers lose their end. `progress`: see token_cache.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(
            "the tokenizer has no end token, so no answer would end",
            where=str(tokenizer.name_or_path),
            cure='"eos_token" in tokenizer_config.json',
        )
    cache = TokenCache(config, tokenizer, progress or no_progress)
    read = examples.read_examples(config, config.dataset, cache, held_out=False)
    other = examples.read_examples(config, config.eval_dataset, cache, held_out=True)
    skipped = examples.report_skipped(config, read, other)
    rows, held_out = read.rows, other.rows
    if config.eval_fraction:
        rows, held_out = _split_held_out(rows, config.eval_fraction, config.seed)
    train = _mix_by_weight(rows, read.source, read.weights, config)
    if not may_cut_ends:
        _check_ends(config, train)
    check_tokens(config, tokenizer, greatest_tokens(train, held_out))
    whole = data_identity(train, held_out)
    report = {
        "dataset": config.dataset,
        "eval_dataset": config.eval_dataset,
        "eval_fraction": config.eval_fraction,
        "context_length": config.context_length,
        "prompt_format": config.prompt_format,
        "template": chat_template.fingerprint(tokenizer),
        "end_token": tokenizer.eos_token,
        "sources": read.sources,
        "eval_sources": other.sources,
        "rows": sum(source["rows"] for source in read.sources),
        "skipped": audit.skipped(skipped),
        "train": audit.statistics(train, tokenizer),
        "held_out": audit.statistics(held_out, tokenizer),
        "duplicates": audit.duplicates(rows, read.source),
        "overlap": audit.overlap(train, held_out),
        "identity": whole,
    }
    return DataSplits(train, held_out, report, whole, cache.news, cache.notes)


def read_held_out(config: TrainConfig, spec: str, tokenizer) -> tuple[Rows, dict]:
    """The rows of `spec` as evaluation rows of `config`, and what was found in them.

    Raises UsageError as `prepare` does.
    """
    part = examples.read_examples(config, spec, TokenCache(config, tokenizer), held_out=True)
    bad = examples.report_skipped(config, part, can_skip=False)
    return part.rows, {
        "context_length": config.context_length,
        "sources": part.sources,
        "skipped": audit.skipped(bad),
        "held_out": audit.statistics(part.rows, tokenizer),
    }


def check_tokens(config: TrainConfig, tokenizer, sequences: Iterable[tuple[Sequence[int] | np.ndarray, str]]) -> None:
    """`found` are tokens and where they stand.

    Raises UsageError for one that the model's embedding has no row for: the tokenizer is that of another model, or has
    more.
    """
    size = architectures.vocabulary(architectures.model_config(config))
    if not size:
        return
    for ids, where in sequences:
        greatest = int(np.max(ids, initial=-1))
        if greatest >= size:
            token = tokenizer.convert_ids_to_tokens(greatest)
            raise UsageError(
                f"the tokenizer makes {token!r} token {greatest}, and the model's embedding has {size} rows",
                where=where,
                cure="the model's own tokenizer; or take what was added to it out of tokenizer.json",
            )


def iterate_tokens(examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, str]]:
    """The tokens of these rows, and where they stand; of a row that was cut the whole prompt, too, which an evaluation
    asks.
    """
    return ((ids, example.where) for example in examples for ids in (example.ids, example.prompt_ids))


def greatest_tokens(*parts: Rows) -> Iterator[tuple[Sequence[int], str]]:
    """The greatest token of each table, and a row that it stands in; of rows that were cut the prompts, too."""
    for table in {id(table): table for rows in parts for table in rows.tables}.values():
        for batch in range(len(table.batches)):
            offsets, ids, _ = table.tokens(batch)
            of_batch = ids[offsets[0] : offsets[-1]]
            if len(of_batch):
                place = int(of_batch.argmax())
                row = int(np.searchsorted(offsets - offsets[0], place, "right")) - 1
                yield [int(of_batch[place])], table.where(int(table.starts[batch]) + row)
            rest = table.batches[batch].column("prompt_rest")
            if len(rest.values):
                place = int(rest.values.to_numpy().argmax())
                row = int(np.searchsorted(rest.offsets.to_numpy(), place, "right")) - 1
                yield [rest.values[place].as_py()], table.where(int(table.starts[batch]) + row)


def _split_held_out(rows: Rows, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """(what stays, what is held out): `fraction` of the distinct rows, at least one, chosen by their content, so that a
    row and its duplicate stay together and adding rows moves few of the others.
    """
    distinct, of_row = np.unique(rows.gather("keys"), return_inverse=True)
    drawn = [hashlib.sha256(f"{seed} {key.tobytes().hex()}".encode()).digest() for key in distinct]
    ranked = sorted(range(len(drawn)), key=drawn.__getitem__)
    out = np.zeros(len(distinct), bool)
    out[ranked[: max(1, round(fraction * len(ranked)))]] = True
    is_out = out[of_row]
    if is_out.all():
        raise UsageError(
            f"eval_fraction {fraction} of {len(ranked)} distinct rows leaves none to train on",
            cure="more rows, or --eval_dataset FILE",
        )
    return rows.take(np.flatnonzero(~is_out)), rows.take(np.flatnonzero(is_out))


def _mix_by_weight(rows: Rows, source: np.ndarray, weights: list[float], config: TrainConfig) -> Rows:
    """The rows of an epoch. `source` int [tables] is the number of each table's source.

    Of a source that is to be seen 2.5 times every row is there twice, and half of them, chosen once by the seed, once
    more.
    """
    of_row = source[rows.table] if len(rows) else np.empty(0, np.int64)
    sizes = np.bincount(of_row, minlength=len(weights))
    parts = [np.empty(0, np.int64)]
    for number, weight in enumerate(_times(sizes, np.array(weights), config.mix_strategy, config.mix_temperature)):
        own = np.flatnonzero(of_row == number)
        part = np.sort(shuffled(len(own), config.seed, number)[: round(weight % 1 * len(own))])
        parts += [own] * int(weight) + [own[part]]
    chosen = np.concatenate(parts)
    if not len(chosen):
        raise UsageError("the weights of the sources leave no row", cure="greater weights")
    return rows.take(chosen)


def _times(sizes: np.ndarray, weights: np.ndarray, strategy: str, temperature: float) -> list[float]:
    """How often an epoch sees the rows of each source: float [sources]; `sizes` int [sources] are their rows.

    concat: as often as its weight says. Interleaved sources have shares of the epoch as their weights (and with a
    temperature their sizes to the power of its inverse) say, and it is as long as the first one (under) or the last one
    (over) that runs out of rows.
    """
    has_rows = sizes > 0
    if strategy == "concat" and not temperature or not has_rows.any():
        return weights.tolist()
    shares = weights * has_rows * (sizes ** (1 / temperature) if temperature else 1.0)
    shares = shares / shares.sum()
    ends = sizes[has_rows] / shares[has_rows]  # rows of an epoch at whose end each source has none left
    total = {"concat": float(sizes @ weights), "interleave_under": ends.min(), "interleave_over": ends.max()}[strategy]
    return np.where(has_rows, total * shares / np.maximum(sizes, 1), 0.0).round(9).tolist()


def _check_ends(config: TrainConfig, train: Rows) -> None:
    """Raises UsageError where most answers would be cut: nothing would teach the model to end one.

    Who states on_long_row has decided.
    """
    is_answered = train.gather("has_answer").astype(bool)
    is_cut = is_answered & (train.gather("length") > 0)
    cut, answered = int(is_cut.sum()), int(is_answered.sum())
    if 2 * cut <= answered or config.asked("on_long_row"):
        return
    lengths = train.gather("whole_lengths")[is_answered]
    contexts = {
        f"cuts {cuts}": int(np.quantile(lengths, share, method="inverted_cdf"))
        for cuts, share in (("none", 1), ("1 %", 0.99), ("5 % of them", 0.95))
    }
    positions = architectures.position_table(architectures.model_config(config))
    possible = [f"{count} {cuts}" for cuts, count in contexts.items() if not positions or count <= positions]
    raise UsageError(
        f"{cut} of {answered} rows have more than {config.context_length} tokens: they would be cut, and "
        f"lose the token that ends the answer",
        where=train.where(int(is_cut.argmax())),
        cure=(f"--context_length {', '.join(possible)}; or " if possible else "shorter rows, or ")
        + "--on_long_row truncate",
    )


def data_identity(train: Rows, held_out: Rows) -> str:
    """sha256 over tokens and masks, in order."""
    digest = hashlib.sha256(f"{len(train)} {len(held_out)}".encode())
    for rows in (train, held_out):
        for content in _contents(rows):
            digest.update(content)
    return digest.hexdigest()


def _contents(rows: Rows) -> Iterator[bytes]:
    """Of each row its length, its tokens and its mask, as little-endian bytes: of rows of one batch together, since a
    million rows are told from one another in a loop.
    """
    first = 0
    while first < len(rows):
        table = rows.tables[rows.table[first]]
        batch, _ = table.place(int(rows.row[first]))
        low, high = int(table.starts[batch]), int(table.starts[batch + 1])
        next_rows = slice(first, first + high - low)
        is_here = (
            (rows.table[next_rows] == rows.table[first]) & (rows.row[next_rows] >= low) & (rows.row[next_rows] < high)
        )
        count = len(is_here) if is_here.all() else int(is_here.argmin())
        offsets, ids, trained = table.tokens(batch)
        places, tokens, masks = offsets.tolist(), ids.astype("<i4", copy=False).data.cast("B"), trained.data.cast("B")
        parts: list[bytes | memoryview] = []
        for row in (rows.row[first : first + count] - low).tolist():
            start, end = places[row], places[row + 1]
            parts += ((end - start).to_bytes(8, "little"), tokens[4 * start : 4 * end], masks[start:end])
        yield b"".join(parts)
        first += count
