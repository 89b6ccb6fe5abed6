"""Fast paths against their definitions, in float64 and float32, and against PEFT's own modules."""

import pytest
import tiny_models
import torch

from anyqlora import data
from anyqlora.on_torch import loss as losses
from anyqlora.on_torch.kernels.cross_entropy import After, cross_entropy, defined

AFTERS = {"nothing": After(), "scaled": After(scale=0.25), "capped": After(cap=3.0), "both": After(scale=2.0, cap=5.0)}


def gradients(value, *tensors):
    return torch.autograd.grad(value, tensors)


@pytest.mark.parametrize("rows", [1, 7, 32, 1000])
@pytest.mark.parametrize("after", AFTERS, ids=str)
@pytest.mark.parametrize("learns", [False, True], ids=["frozen head", "trained head"])
def test_cross_entropy_is_its_definition(after, rows, learns):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((33, 24), (50, 24), (50,)))
    targets = torch.randint(50, (33,), generator=generator)
    inputs = [hidden.requires_grad_(), *([weight.requires_grad_(), bias.requires_grad_()] if learns else [])]
    ours = cross_entropy(hidden, weight, bias, targets, after=AFTERS[after], rows=rows) / 7
    theirs = defined(hidden, weight, bias, targets, after=AFTERS[after]) / 7
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for mine, other in zip(gradients(ours, *inputs), gradients(theirs, *inputs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_cross_entropy_in_float32_is_exact_and_in_16_bits_within_rounding():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(64, 32, generator=generator), torch.randn(4000, 32, generator=generator)
    targets = torch.randint(4000, (64,), generator=generator)
    exact = hidden.double().requires_grad_()
    expected = defined(exact, weight.double(), None, targets)
    (of_hidden,) = gradients(expected / 1000, exact)
    for dtype, loss_within, gradient_within in ((torch.float32, 1e-6, 1e-5), (torch.bfloat16, 3e-3, 0.02), (torch.float16, 1e-3, 5e-3)):
        h = hidden.to(dtype).requires_grad_()
        ours = cross_entropy(h, weight.to(dtype), None, targets, rows=16)
        assert ours.dtype == torch.float32 and ours.item() == pytest.approx(expected.item(), rel=loss_within)
        (found,) = gradients(ours / 1000, h)
        assert (found.double() - of_hidden).norm() < gradient_within * of_hidden.norm(), dtype


def test_far_off_logits_give_finite_losses():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight, targets = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    ours = cross_entropy(hidden, weight, None, targets, rows=2)
    assert ours.item() == 800 and gradients(ours, hidden)[0].flatten().tolist() == [2.0, -2.0]


def test_no_gradient_is_made_without_one():
    hidden, weight = torch.randn(4, 8), torch.randn(16, 8, requires_grad=True)
    with torch.no_grad():
        assert not cross_entropy(hidden, weight, None, torch.zeros(4, dtype=torch.long), rows=2).requires_grad


# ------------------------------------------------------------------------------------------------ through the model's own forward


CHANGED = {"cohere": {"logit_scale": 0.0625, "pad_token_id": 0}, "gemma": {"head_dim": 16}}
ALL = {**dict.fromkeys(tiny_models.ARCHITECTURES, {}), **CHANGED}


@pytest.fixture(scope="module", params=ALL)
def started(request, tmp_path_factory):
    directory = tiny_models.make(tmp_path_factory.mktemp("base"), request.param, **ALL[request.param])
    found = tiny_models.Started(tmp_path_factory.mktemp("run"), directory, train_type="lora", loss_rows=16)
    found.architecture = request.param
    return found


def test_the_loss_on_trained_tokens_is_the_loss(started):
    """Every architecture, whatever it does after its head; the reference makes all logits by the model's own forward."""
    assert isinstance(started.runtime.loss, losses.TrainedTokenLoss) and started.built.notes == []
    (batch,) = started.run.stream[0]
    for name, parameter in started.built.trainable.items():
        torch.nn.init.normal_(parameter, std=0.05) if "lora_B" in name else None
    device, trainable = torch.device("cpu"), list(started.built.trainable.values())
    ours, theirs = started.runtime.loss(started.model, batch, device), losses.token_loss(started.model, batch, device)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(gradients(ours / 50, *trainable), gradients(theirs / 50, *trainable), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-6 * float(other.abs().max()))


def test_what_follows_the_head_is_what_the_configuration_says(started):
    expected = {"granite": After(scale=0.5), "gemma2": After(cap=3.0), "cohere": After(scale=0.0625)}
    assert started.runtime.loss.after == expected.get(started.architecture, After())


def test_an_architecture_that_does_something_else_after_its_head_is_named(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora")
    model = started.model
    model.register_forward_hook(lambda module, arguments, output: setattr(output, "logits", output.logits**3) or output)
    assert losses.loss_of(model, 16) == (losses.token_loss, "what it does to logits after its head is not known here")


def test_no_more_logits_than_asked_for_are_made(tmp_path):
    """Not by the head in training, and not by anything else: the largest tensor of the vocabulary's width has `loss_rows` rows."""
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "llama"), train_type="lora", loss_rows=8)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            seen.extend(t.shape for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor))
            return out

    (batch,) = started.run.stream[0]
    with Watch():
        (started.runtime.loss(started.model, batch, torch.device("cpu")) / batch.trained).backward()
    vocabulary = started.model.get_output_embeddings().out_features
    weight = torch.Size((started.model.config.hidden_size, vocabulary))  # as the product takes it
    assert max(shape.numel() // vocabulary for shape in seen if shape[-1:] == (vocabulary,) and shape != weight) == 8 < batch.trained


def test_full_fine_tuning_learns_a_tied_head_as_by_the_definition(tmp_path):
    started = tiny_models.Started(tmp_path, tiny_models.make(tmp_path / "base", "qwen2"), train_type="full", loss_rows=16)
    (batch,) = started.run.stream[0]
    trainable = list(started.built.trainable.values())
    assert data.IGNORE in batch.targets
    found = [gradients(loss(started.model, batch, torch.device("cpu")), *trainable) for loss in (started.runtime.loss, losses.token_loss)]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
