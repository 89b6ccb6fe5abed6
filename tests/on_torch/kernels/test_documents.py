"""Documents in rows: what attention has to know of them, against a plain loop over the numbers; and which ones a mask
names."""

import itertools

import numpy as np
import pytest
import torch

from anyqlora.on_torch.kernels.documents import CurrentDocuments, Documents

ROWS = {
    "one": [[1, 1, 1, 1]],
    "some": [[1, 1, 2, 3, 3, 3], [1, -1, -1, 4, 4, 5]],
    "the same number on both sides of a row's end": [[1, 2, 2], [2, 2, 3]],
    "padding alone": [[-1, -1], [0, -1]],
    "a token each": [[0], [0], [1]],
}


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_spans_and_bounds_are_those_of_a_loop(rows):
    spans, starts = [], []
    for row, numbers in enumerate(ROWS[rows]):
        first = 0
        for number, group in itertools.groupby(numbers):
            end = first + len(list(group))
            starts.append(row * len(numbers) + first)
            spans += [[row, first, end]] * (number >= 0)
            first = end
    starts.append(np.size(ROWS[rows]))
    numbers = np.array(ROWS[rows], np.int32)
    for documents in (Documents.on(torch.device("cpu"), numbers), Documents.read(torch.from_numpy(numbers))):
        assert documents.numbers.dtype == torch.int32 and documents.numbers.tolist() == ROWS[rows]
        assert documents.spans.dtype == np.int64 and documents.spans.tolist() == spans
        assert documents.longest == max(end - first for _, first, end in spans)
        bounds, longest = documents.bounds
        assert bounds.dtype == torch.int32 and bounds.tolist() == starts and longest == np.diff(starts).max()
        assert documents.bounds[0] is bounds and documents.spans is documents.spans


def test_a_mask_names_the_documents_of_the_batch_that_it_is_of():
    """However it is viewed or detached; numbers elsewhere in memory are other documents, even where they are equal."""
    current, documents = (
        CurrentDocuments(),
        Documents.on(torch.device("cpu"), np.array([[0, 0, 1], [0, 1, 1]], np.int32)),
    )
    mask = documents.numbers[:, None, None]
    current.set(documents)
    assert current.of(mask[:, 0, 0]) is documents and current.of(mask.detach()[:, 0, 0]) is documents
    for numbers in (mask[:, 0, 0].clone(), mask[:1, 0, 0], mask[..., :2][:, 0, 0], documents.numbers.T.contiguous().T):
        other = current.of(numbers)
        assert other is not documents and torch.equal(other.numbers, numbers)
        assert other.host_numbers.tolist() == numbers.tolist()
    current.set(None)
    assert current.of(mask[:, 0, 0]) is not documents
