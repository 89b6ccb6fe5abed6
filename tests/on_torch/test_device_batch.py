"""A micro-batch on the device: what is counted of it in host memory, and that attention has it when layers run
again."""

import pytest
import torch

from anyqlora.data import stream
from anyqlora.on_torch.device_batch import DeviceBatch, padding_rows
from anyqlora.on_torch.kernels.documents import Documents
from anyqlora.planning.backends import BackendManager
from tests.support import tiny_models

CPU = torch.device("cpu")


def a_batch(started, first=0):
    """Two packed documents and a third beside them, of different lengths."""
    rows = started.run.data.train[first : first + 3]
    return stream.collate([rows[:2], rows[2:]], 0)


def read_counter(monkeypatch) -> list:
    """A list that grows whenever documents are counted on the device's side, which waits for it."""
    read, seen = Documents.read, []
    monkeypatch.setattr(Documents, "read", lambda numbers: seen.append(numbers.shape) or read(numbers))
    return seen


def test_a_batch_asks_nothing_of_the_device(tmp_path, monkeypatch):
    """What is trained and where documents lie is found in the host's numbers: a GPU would be waited for."""
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    batch = a_batch(started)
    for here in (DeviceBatch.padded(batch, CPU), DeviceBatch.unpadded(batch, CPU)):
        assert torch.equal(here.trained, (here.targets != stream.IGNORE_INDEX).nonzero().squeeze(1))
        assert len(here.trained) == batch.trained and here.positions.shape == here.ids.shape
    assert here.ids.shape == (1, batch.tokens + padding_rows(batch.tokens))
    starts = (here.positions[0] == 0).nonzero().flatten().tolist()
    assert here.documents.spans.tolist() == [
        [0, first, end] for first, end in zip(starts, [*starts[1:], here.ids.shape[1]], strict=True)
    ]
    assert torch.equal(here.documents.numbers, (here.positions == 0).cumsum(1, dtype=torch.int32))
    reads = read_counter(monkeypatch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        started.built.loss(started.model, batch, CPU)
    assert not any(event.key == "aten::nonzero" for event in seen.key_averages()) and reads == []


def test_flat_rows_have_few_lengths():
    """oneDNN compiles its products for each."""
    lengths = [tokens + padding_rows(tokens) for tokens in range(1, 4097)]
    assert all(tokens <= length < tokens + max(8, tokens / 16 + 1) for tokens, length in enumerate(lengths, 1))
    assert len({length for length in lengths if 1024 < length <= 2048}) == 16 and len(set(lengths)) < 120


@pytest.mark.parametrize("kernels", ["portable", "native"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_run_again_see_their_own_batchs_documents(reentrant, kernels, tmp_path, monkeypatch):
    """Gradients of layers that keep all they need are the reference. Where one batch's backward comes before the next
    one's forward nothing is counted anew; else each layer that runs again counts its own batch's documents, not the
    later one's."""
    if kernels not in BackendManager("cpu").report.kernels:
        pytest.skip(BackendManager("cpu").report.why(kernels))
    base, found = tiny_models.make(tmp_path / "base", "llama"), {}
    reads = read_counter(monkeypatch)
    for recomputes in (False, True):
        started = tiny_models.Started(
            tmp_path / str(recomputes),
            base,
            train_type="lora",
            precision="bf16" if kernels == "native" else "fp32",
            kernels=kernels,
            use_gradient_checkpointing=recomputes,
            reentrant_checkpointing=recomputes and reentrant,
        )
        assert started.built.loss.spec.is_unpadded and started.model.is_gradient_checkpointing == recomputes
        trainable = list(started.built.trainable.values())
        for number, (name, parameter) in enumerate(started.built.trainable.items()):
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(number))
        first, second = (a_batch(started, number) for number in (0, 6))
        found[recomputes] = []
        for later in ([], [second]):
            reads.clear()
            loss, *_ = [started.loss(batch) for batch in (first, *later)]
            loss.backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in trainable])
            found[recomputes].append((gradient, len(reads)))
            started.model.zero_grad()
    (expected, none), (again, none_again) = found[False]
    (recomputed, few), (after_another, of_each_layer) = found[True]
    assert (none, none_again, few, of_each_layer) == (0, 0, 0, 2)
    assert torch.equal(again, expected) and torch.equal(after_another, recomputed)
    assert (recomputed - expected).norm() < 1e-3 * expected.norm()  # the last MLP's tokens are summed in another order
