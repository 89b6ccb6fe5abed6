"""The batch at a step: a function of the seed, for any split of the same global batch.

Property tests by plain random loops.
"""

import random
from collections import Counter

import numpy as np
import pytest

from anyqlora.data import dataset
from anyqlora.data.packing import grouped, pack, shuffled
from anyqlora.data.rows import Example
from anyqlora.data.stream import IGNORE_INDEX, BatchStream, make_batches
from tests.support.data_fixtures import byte_level, settings, write


def examples(count, seed=0, longest=12):
    """Examples with tokens that are seen nowhere else, so that a mixed-up batch cannot go unseen."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.randint(2, longest)
        ids = np.arange(1000 * number + 1, 1000 * number + 1 + length, dtype=np.int32)
        trained = np.array([rng.random() < 0.6 for _ in ids])
        made.append(Example(ids, trained, f"f:{number}", ids[:1], "", None))
    return made


def stream(rows, **more):
    asked = {
        "batch_size": 2,
        "gradient_accumulation_steps": 3,
        "num_epochs": 2,
        "max_steps": -1,
        "seed": 7,
        "packing": False,
        "context_length": 16,
        "pad_id": 0,
        **more,
    }
    return BatchStream(rows, **asked)


def rows_of(step):
    return [where for batch in step for where in batch.rows]


def test_order_is_philox_as_published():
    """Reference: the order of Philox4x64-10 with key (42, 3) as it was when this was written: if it changes, no run
    resumes.
    """
    assert shuffled(8, 42, 3).tolist() == GOLDEN
    assert sorted(shuffled(1000, 1, 0)) == list(range(1000)) and not np.array_equal(
        shuffled(1000, 1, 0), shuffled(1000, 1, 1)
    )


GOLDEN = [1, 6, 3, 4, 5, 2, 0, 7]


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_once_per_epoch_whatever_the_split(packing):
    rng = random.Random(1)
    for _ in range(60):
        rows = examples(rng.randint(1, 40), rng.random())
        made = stream(
            rows,
            batch_size=rng.randint(1, 5),
            gradient_accumulation_steps=rng.randint(1, 4),
            packing=packing,
            seed=rng.randint(0, 99),
        )
        seen = Counter(where for step in range(made.steps_per_epoch) for where in rows_of(made[step]))
        assert seen == {row.where: 1 for row in rows}
        assert Counter(where for step in made for where in rows_of(step)) == {row.where: 2 for row in rows}


def test_halving_the_batch_and_doubling_the_accumulation_changes_nothing():
    rows = examples(45)
    one, other = (
        stream(rows, batch_size=4, gradient_accumulation_steps=3),
        stream(rows, batch_size=2, gradient_accumulation_steps=6),
    )
    assert len(one) == len(other) == 8
    assert [rows_of(step) for step in one] == [rows_of(step) for step in other]


def test_any_world_size_sees_the_same_global_batch_with_as_many_micro_batches_on_each_rank():
    rng = random.Random(2)
    for _ in range(60):
        rows, world, size = examples(rng.randint(1, 50)), rng.choice([2, 3, 4]), rng.randint(1, 3)
        whole = stream(rows, batch_size=size * world)
        ranks = [stream(rows, batch_size=size, rank=rank, world_size=world) for rank in range(world)]
        assert {len(rank) for rank in ranks} == {len(whole)}
        for step in range(len(whole)):
            shares = [rank[step] for rank in ranks]
            assert {len(share) for share in shares} == {len(whole[step])}
            for number, batch in enumerate(whole[step]):
                assert tuple(where for share in shares for where in share[number].rows) == batch.rows
                assert sum(share[number].trained for share in shares) == batch.trained
                for share in shares:
                    if not share[number].rows:
                        assert share[number].ids.shape == (1, 1) and share[number].trained == share[number].tokens == 0


def test_a_step_is_the_same_however_it_was_reached():
    rows = examples(30)
    walked, jumped = list(stream(rows, num_epochs=3)), stream(rows, num_epochs=3)
    for step in random.Random(3).sample(range(len(walked)), len(walked)):
        for one, other in zip(walked[step], jumped[step], strict=True):
            assert (
                one.rows == other.rows
                and np.array_equal(one.ids, other.ids)
                and np.array_equal(one.targets, other.targets)
            )


def test_max_steps_stops_within_an_epoch_or_runs_into_further_ones():
    rows = examples(20)
    assert [len(stream(rows, max_steps=n)) for n in (-1, 1, 5, 100)] == [8, 1, 5, 100]
    long = stream(rows, max_steps=10)
    assert long.steps_per_epoch == 4 and long.epoch(10) == 2.5
    assert set(rows_of(long[8]) + rows_of(long[9])) <= {row.where for row in rows}
    assert rows_of(long[8]) not in (rows_of(long[0]), rows_of(long[4]))
    with pytest.raises(IndexError):
        long[10]


def test_targets_are_the_next_tokens_by_a_plain_loop():
    rng = random.Random(4)
    for _ in range(30):
        rows = examples(rng.randint(1, 9), rng.random())
        for batch in (b for packing in (False, True) for step in stream(rows, packing=packing) for b in step):
            check(batch, {row.where: row for row in rows})


def check(batch, by_where):
    """Reference: each document, token by token."""
    where = iter(batch.rows)
    for ids, targets, positions, segments in zip(
        batch.ids, batch.targets, batch.positions, batch.segments, strict=True
    ):
        place = 0
        for number in range(segments.max() + 1):
            row = by_where[next(where)]
            for i, token in enumerate(row.ids):
                expected = row.ids[i + 1] if i + 1 < len(row.ids) and row.trained[i + 1] else IGNORE_INDEX
                assert (ids[place], targets[place], positions[place], segments[place]) == (token, expected, i, number)
                place += 1
        for i, rest in enumerate(range(place, len(ids))):
            assert (ids[rest], targets[rest], positions[rest], segments[rest]) == (0, IGNORE_INDEX, i, -1)
    assert next(where, None) is None


def test_a_micro_batch_is_as_wide_as_its_longest_row():
    rows = examples(20)
    for batch in (b for step in stream(rows) for b in step):
        assert batch.ids.shape[1] == (batch.segments >= 0).sum(1).max()
        assert {a.dtype for a in (batch.ids, batch.targets, batch.positions, batch.segments)} == {np.dtype(np.int32)}


def test_packing_fills_sequences_and_never_overfills_them():
    rng = random.Random(5)
    for _ in range(50):
        capacity = rng.randint(8, 64)
        lengths = [rng.randint(1, capacity) for _ in range(rng.randint(0, 200))]
        sequences = pack(lengths, capacity, rng.randint(0, 9))
        assert sorted(i for sequence in sequences for i in sequence) == list(range(len(lengths)))
        filled = [sum(lengths[i] for i in sequence) for sequence in sequences]
        assert max(filled, default=0) <= capacity
        assert sum(full <= capacity // 2 for full in filled) <= 1  # two half-empty sequences would be one
    assert pack([3, 5, 4], 8, 1) == pack([3, 5, 4], 8, 1)


def test_packing_makes_fewer_sequences_of_the_same_rows():
    rows = examples(60, longest=8)
    packed, plain = stream(rows, packing=True), stream(rows)
    assert packed.sequence_count < plain.sequence_count / 2
    assert sum(b.trained for i in range(packed.steps_per_epoch) for b in packed[i]) == sum(
        b.trained for i in range(plain.steps_per_epoch) for b in plain[i]
    )


def test_batches_for_evaluation_keep_the_order():
    rows = examples(7)
    made = make_batches(rows, 3, None)
    assert [batch.rows for batch in made] == [("f:0", "f:1", "f:2"), ("f:3", "f:4", "f:5"), ("f:6",)]


def test_a_real_data_set_survives_packing(tmp_path):
    """Reference: the text of the rows."""
    tokens, rows = byte_level(), [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(25)]
    read = dataset.load_data(settings(write(tmp_path / "rows.jsonl", *rows)), tokens)
    texts = set()
    for batch in stream(read.train, packing=True, context_length=64)[0]:
        for ids, segments in zip(batch.ids, batch.segments, strict=True):
            texts |= {tokens.decode(ids[segments == n]) for n in range(segments.max() + 1)}
    assert texts <= {row["prompt"] + row["completion"] + "</s>" for row in rows} and len(texts) > 10


@pytest.mark.parametrize("count", [0, 5, 64, 1000, 1003])
def test_grouped_rows_are_a_permutation_with_steps_of_one_length(count):
    lengths = np.random.default_rng(1).integers(1, 1000, count)
    for epoch in range(3):
        order = grouped(lengths, 8, 3, epoch)
        assert sorted(order.tolist()) == list(range(count))
        assert order.tolist() == grouped(lengths, 8, 3, epoch).tolist()
    if count >= 64:
        assert grouped(lengths, 8, 3, 0).tolist() != grouped(lengths, 8, 3, 1).tolist()
        steps = [lengths[order[start : start + 8]] for start in range(0, count // 8 * 8, 8)]
        plain = [lengths[part] for part in np.array_split(np.arange(count // 8 * 8), count // 8)]
        assert np.mean([np.ptp(step) for step in steps]) < 0.3 * np.mean([np.ptp(step) for step in plain])
        assert max(map(max, steps)) == max(steps[0])
    if count == 1000:  # short and long steps take turns, over all of the epoch
        means = np.array([step.mean() for step in steps])
        assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3


def test_steps_of_one_length_do_not_depend_on_processes_or_on_where_a_run_stopped():
    rows = examples(64, longest=40)
    asked = {"batch_size": 8, "gradient_accumulation_steps": 1, "group_by_length": True}
    alone, late = stream(rows, **asked), stream(rows, **asked)
    halves = [stream(rows, **{**asked, "batch_size": 4}, rank=rank, world_size=2) for rank in range(2)]
    for step in reversed(range(len(alone))):
        parts = [row for half in halves for batch in half[step] for row in batch.rows]
        assert sorted(parts) == sorted(alone.rows(step))
    assert [late.rows(step) for step in (9, 3)] == [alone.rows(step) for step in (9, 3)]
