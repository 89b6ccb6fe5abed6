"""From a configuration to batches: rows are read, tokenised and masked once; the batch at a step is a function of the
seed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from anyqlora.config.schema import TrainConfig
from anyqlora.core.errors import UsageError
from anyqlora.data import audit, chat_template, examples
from anyqlora.data.examples import Example
from anyqlora.data.packing import shuffled
from anyqlora.data.stream import Batch, make_batches
from anyqlora.models import architectures


@dataclass(frozen=True)
class DataSplits:
    """Everything a run reads."""

    train: list[Example]
    held_out: list[Example]
    report: dict  # JSON-able
    identity: str  # sha256 of all tokens and masks, in order

    def sample(self, batch_size: int, tokens: int = 1024) -> list[Batch]:
        """The first training rows, as many as have so many tokens together."""
        lengths = np.cumsum([len(row.ids) for row in self.train[:tokens]])
        return make_batches(self.train[: 1 + int(np.searchsorted(lengths[:-1], tokens))], batch_size, 0)


def load_data(config: TrainConfig, tokenizer, *, may_cut_ends: bool = False) -> DataSplits:
    """Read, check, tokenise and mask everything that `config` names.

    Raises UsageError with up to 20 bad rows, each as file:line[:col], reason and cure; with on_bad_row skip they are in
    the report. `may_cut_ends`: also where most answers lose their end.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(
            "the tokenizer has no end token, so no answer would end",
            where=str(tokenizer.name_or_path),
            cure='"eos_token" in tokenizer_config.json',
        )
    read = examples.read_examples(config, config.dataset, tokenizer, held_out=False)
    other = examples.read_examples(config, config.eval_dataset, tokenizer, held_out=True)
    skipped = examples.report_skipped(config, read, other)
    rows, held_out = read.examples, [example for example, _ in other.examples]
    if config.eval_fraction:
        rows, held_out = _split_held_out(rows, config.eval_fraction, config.seed)
    train = _mix_by_weight(rows, read.weights, config.seed)
    if not may_cut_ends:
        _check_ends(config, train)
    check_tokens(config, tokenizer, iterate_tokens(train + held_out))
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
        "duplicates": audit.duplicates(rows),
        "overlap": audit.overlap(train, held_out),
        "identity": whole,
    }
    return DataSplits(train, held_out, report, whole)


def read_held_out(config: TrainConfig, spec: str, tokenizer) -> tuple[list[Example], dict]:
    """The rows of `spec` as evaluation rows of `config`, and what was found in them.

    Raises UsageError as `prepare` does.
    """
    part = examples.read_examples(config, spec, tokenizer, held_out=True)
    bad = examples.report_skipped(config, part, can_skip=False)
    rows = [example for example, _ in part.examples]
    return rows, {
        "context_length": config.context_length,
        "sources": part.sources,
        "skipped": audit.skipped(bad),
        "held_out": audit.statistics(rows, tokenizer),
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


def iterate_tokens(examples: list[Example]) -> Iterator[tuple[np.ndarray, str]]:
    """The tokens of these rows, and where they stand; of a row that was cut the whole prompt, too, which an evaluation
    asks.
    """
    return ((ids, example.where) for example in examples for ids in (example.ids, example.prompt_ids))


def _split_held_out(
    rows: list[tuple[Example, int]], fraction: float, seed: int
) -> tuple[list[tuple[Example, int]], list[Example]]:
    """(what stays, what is held out): `fraction` of the distinct rows, at least one, chosen by their content, so that a
    row and its duplicate stay together and adding rows moves few of the others.
    """
    ranked = sorted(
        {example.key for example, _ in rows}, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).digest()
    )
    out = set(ranked[: max(1, round(fraction * len(ranked)))])
    stay = [(example, source) for example, source in rows if example.key not in out]
    if not stay:
        raise UsageError(
            f"eval_fraction {fraction} of {len(ranked)} distinct rows leaves none to train on",
            cure="more rows, or --eval_dataset FILE",
        )
    return stay, [example for example, _ in rows if example.key in out]


def _mix_by_weight(rows: list[tuple[Example, int]], weights: list[float], seed: int) -> list[Example]:
    """The rows of an epoch: weight 2 is every row of a source twice, weight 0.5 half of its rows, chosen once, by the
    seed.
    """
    train = []
    for source, group in itertools.groupby(rows, key=lambda row: row[1]):
        examples = [example for example, _ in group]
        part = np.sort(shuffled(len(examples), seed, source)[: round(weights[source] % 1 * len(examples))])
        train += examples * int(weights[source]) + [examples[i] for i in part]
    if not train:
        raise UsageError("the weights of the sources leave no row", cure="greater weights")
    return train


def _check_ends(config: TrainConfig, train: list[Example]) -> None:
    """Raises UsageError where most answers would be cut: nothing would teach the model to end one.

    Who states on_long_row has decided.
    """
    answered = [example for example in train if example.answer is not None]
    cut = [example for example in answered if example.truncated]
    if 2 * len(cut) <= len(answered) or config.sources.get("on_long_row", "default") != "default":
        return
    lengths = audit.whole_lengths(answered)
    contexts = {
        f"cuts {cuts}": int(np.quantile(lengths, share, method="inverted_cdf"))
        for cuts, share in (("none", 1), ("1 %", 0.99), ("5 % of them", 0.95))
    }
    positions = architectures.position_table(architectures.model_config(config))
    possible = [f"{count} {cuts}" for cuts, count in contexts.items() if not positions or count <= positions]
    raise UsageError(
        f"{len(cut)} of {len(answered)} rows have more than {config.context_length} tokens: they would be cut, and "
        f"lose the token that ends the answer",
        where=cut[0].where,
        cure=(f"--context_length {', '.join(possible)}; or " if possible else "shorter rows, or ")
        + "--on_long_row truncate",
    )


def data_identity(train: list[Example], held_out: list[Example]) -> str:
    """sha256 over tokens and masks, in order."""
    digest = hashlib.sha256(f"{len(train)} {len(held_out)}".encode())
    for example in itertools.chain(train, held_out):
        digest.update(len(example.ids).to_bytes(8, "little"))
        digest.update(np.asarray(example.ids, "<i4").tobytes())
        digest.update(np.asarray(example.trained, np.uint8).tobytes())
    return digest.hexdigest()
