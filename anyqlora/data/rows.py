"""Rows as tokens: tables in Arrow's form, in memory or mapped from a file, and selections of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np
from numpy.typing import DTypeLike

if TYPE_CHECKING:
    import pyarrow as pa

NO_LINE = -1


@cache
def schema() -> pa.Schema:
    """The columns of a table."""
    import pyarrow as pa  # a tenth of a second, which a usage error does not wait for

    return pa.schema(
        [
            ("ids", pa.list_(pa.int32())),
            ("trained", pa.list_(pa.uint8())),
            ("line", pa.int64()),  # in the file; NO_LINE: `where` is the name of the table alone
            ("prompt", pa.int32()),  # tokens of the prompt that are among the ids
            ("prompt_rest", pa.list_(pa.int32())),  # those that are not: of a row that was cut
            ("length", pa.int32()),  # tokens before the row was cut; 0: it was not
            ("trained_tokens", pa.int32()),
            ("has_answer", pa.bool_()),
            ("key", pa.binary(32)),
            ("prompt_text", pa.string()),
            ("answer_text", pa.string()),
        ]
    )


@dataclass(frozen=True, eq=False)
class Example:
    """One document as tokens."""

    ids: np.ndarray  # int32 [n]
    trained: np.ndarray  # bool [n]: token i is one to be learned
    where: str  # "file:line"
    prompt_ids: np.ndarray  # int32 [m]: what the model is given before the last answer
    prompt: str
    answer: str | None  # text of the last answer; None for raw text
    truncated: bool = False
    key: str = ""  # hash of the row's text: equal for duplicates
    length: int = 0  # tokens before it was cut; 0: as many as there are


def batch_of(examples: Sequence[Example], *, texts: bool) -> pa.RecordBatch:
    """Arrow's form of some examples of one file; without `texts` what a prompt and its answer say is left out."""
    import pyarrow as pa

    columns: dict[str, list] = {name: [] for name in schema().names if name not in ("ids", "trained")}
    for example in examples:
        place, _, line = example.where.rpartition(":")
        count = len(example.ids)
        common = min(count, len(example.prompt_ids))
        if not np.array_equal(example.ids[:common], example.prompt_ids[:common]):
            common = 0  # asked in other tokens than it is written in
        columns["line"].append(int(line) if place and line.isdigit() else NO_LINE)
        columns["prompt"].append(common)
        columns["prompt_rest"].append(example.prompt_ids[common:])
        columns["length"].append(max(example.length, count + 1) if example.truncated else 0)
        columns["trained_tokens"].append(int(example.trained[1:].sum()))
        columns["has_answer"].append(example.answer is not None)
        columns["key"].append(bytes.fromhex(example.key).ljust(32, b"\0"))
        columns["prompt_text"].append(example.prompt if texts else None)
        columns["answer_text"].append(example.answer if texts else None)
    offsets = np.zeros(len(examples) + 1, np.int32)
    np.cumsum([len(example.ids) for example in examples], out=offsets[1:])
    flat = {
        "ids": np.concatenate([np.empty(0, np.int32), *(e.ids for e in examples)]).astype(np.int32),
        "trained": np.concatenate([np.empty(0, bool), *(e.trained for e in examples)]).view(np.uint8),
    }
    arrays = {name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)) for name, values in flat.items()}
    arrays |= {name: pa.array(values, schema().field(name).type) for name, values in columns.items()}
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema().names], schema=schema())


class TokenTable:
    """The examples of one file. Of a mapped one only what is looked at is in memory."""

    def __init__(self, name: str, batches: Sequence[pa.RecordBatch]):
        """`name` is the file that the rows come from."""
        self.name, self.batches = name, [batch for batch in batches if batch.num_rows]
        self.starts = np.cumsum([0, *(batch.num_rows for batch in self.batches)])  # of each batch, and the end
        self._views: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    @classmethod
    def of_file(cls, name: str, path: Path) -> TokenTable:
        """What was written to `path`, mapped. Raises OSError, pyarrow.ArrowException."""
        import pyarrow as pa

        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return cls(name, [reader.get_batch(number) for number in range(reader.num_record_batches)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def column(self, name: str) -> np.ndarray:
        """A column of plain numbers, of all rows."""
        parts = [batch.column(name).to_numpy(zero_copy_only=False) for batch in self.batches]
        return np.concatenate(parts) if parts else np.empty(0, schema().field(name).type.to_pandas_dtype())

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [rows]: tokens of each."""
        parts = [np.diff(self.tokens(number)[0]) for number in range(len(self.batches))]
        return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)

    @cached_property
    def trained_tokens(self) -> np.ndarray:
        """int32 [rows]: trained tokens of each, but for the first."""
        return self.column("trained_tokens").astype(np.int32)

    @cached_property
    def whole_lengths(self) -> np.ndarray:
        """int32 [rows]: tokens before a row was cut."""
        cut = self.column("length").astype(np.int32)
        return np.where(cut > 0, cut, self.lengths)

    @property
    def keys(self) -> np.ndarray:
        """S32 [rows]: hash of the text of each."""
        parts = [
            np.frombuffer(batch.column("key").buffers()[1], "V32", len(batch), 32 * batch.column("key").offset)
            for batch in self.batches
        ]
        return np.concatenate([np.empty(0, "V32"), *parts])

    def tokens(self, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offsets int32 [n + 1], ids int32, trained bool) of the rows of one batch, as they lie there."""
        if batch not in self._views:
            ids, trained = (self.batches[batch].column(name) for name in ("ids", "trained"))
            self._views[batch] = (
                ids.offsets.to_numpy(),
                ids.values.to_numpy(),
                trained.values.to_numpy().view(bool),
            )
        return self._views[batch]

    def where(self, row: int) -> str:
        """ "file:line" of a row."""
        batch, at = self.place(row)
        line = self.batches[batch].column("line")[at].as_py()
        return self.name if line == NO_LINE else f"{self.name}:{line}"

    def example(self, row: int) -> Example:
        """One row."""
        batch, at = self.place(row)
        offsets, ids, trained = self.tokens(batch)
        start, end = offsets[at], offsets[at + 1]
        columns = self.batches[batch]
        count, length = columns.column("prompt")[at].as_py(), columns.column("length")[at].as_py()
        rest = columns.column("prompt_rest")[at].as_py()
        prompt = ids[start : start + count].copy()  # what is mapped cannot be written, and torch warns of that
        has_answer = columns.column("has_answer")[at].as_py()
        return Example(
            ids[start:end].copy(),
            trained[start:end].copy(),
            self.where(row),
            np.concatenate([prompt, np.array(rest, np.int32)]) if rest else prompt,
            columns.column("prompt_text")[at].as_py() or "",
            (columns.column("answer_text")[at].as_py() or "") if has_answer else None,
            length > 0,
            columns.column("key")[at].as_py().hex(),
            length,
        )

    def place(self, row: int) -> tuple[int, int]:
        """(the batch that a row is in, its number there)."""
        batch = int(np.searchsorted(self.starts, row, "right")) - 1
        return batch, int(row - self.starts[batch])


class Rows(Sequence[Example]):
    """Some rows of some tables, in an order: what is chosen is numbers, and each example is made when it is asked
    for.
    """

    def __init__(self, tables: Sequence[TokenTable], table: np.ndarray, row: np.ndarray):
        """`table` int16 [n] and `row` int32 [n]: which row of which table."""
        self.tables, self.table, self.row = list(tables), table.astype(np.int16), row.astype(np.int32)

    @classmethod
    def all_of(cls, tables: Sequence[TokenTable]) -> Rows:
        """Every row, in order."""
        table = np.repeat(np.arange(len(tables), dtype=np.int16), [len(table) for table in tables])
        row = np.concatenate([np.empty(0, np.int32), *(np.arange(len(table), dtype=np.int32) for table in tables)])
        return cls(tables, table, row)

    @classmethod
    def of(cls, examples: Iterable[Example]) -> Rows:
        """Rows of examples that are in memory, or as they are."""
        if isinstance(examples, Rows):
            return examples
        tables: dict[str, list[Example]] = {}
        numbers_of: dict[str, int] = {}
        order = []
        for example in examples:
            place, _, line = example.where.rpartition(":")
            name = place if place and line.isdigit() else example.where
            rows = tables.setdefault(name, [])
            order.append((numbers_of.setdefault(name, len(numbers_of)), len(rows)))
            rows.append(example)
        numbers = np.array(order, np.int32).reshape(-1, 2)
        made = [TokenTable(name, [batch_of(rows, texts=True)]) for name, rows in tables.items()]
        return cls(made, numbers[:, 0], numbers[:, 1])

    def __len__(self) -> int:
        return len(self.row)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.tables[self.table[index]].example(int(self.row[index]))

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def take(self, numbers: np.ndarray) -> Rows:
        """Those of these numbers, in their order."""
        return Rows(self.tables, self.table[numbers], self.row[numbers])

    def where(self, index: int) -> str:
        """ "file:line" of a row."""
        return self.tables[self.table[index]].where(int(self.row[index]))

    def gather(self, column: str) -> np.ndarray:
        """An attribute of the tables, or a column of theirs, for each row."""
        parts = [
            getattr(table, column) if hasattr(TokenTable, column) else table.column(column) for table in self.tables
        ]
        return self.pick(parts, np.int32)

    def pick(self, parts: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
        """Of what is known of all rows of each table that of these rows; `dtype` where there are no tables."""
        if not parts:
            return np.empty(0, dtype)
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        return np.concatenate(parts)[starts[self.table] + self.row]
