"""Every architecture through our path: read, quantized, one step, saved - and read again by plain transformers and
PEFT.
"""

import pytest
import torch

from anyqlora.core.errors import RunError
from anyqlora.data import stream
from tests.support import tiny_models

QUANTIZERS = {
    "phi3": "fp4",
    "qwen2": "int8",
    "gpt_neox": "int8",
    "olmo2": "none",
    "gpt2": "nf4",
    "olmoe": "int8",
}  # nf4 for the rest
LEAKY = ("gpt_oss",)  # transformers 5.23 does not keep its packed documents apart


@pytest.fixture(scope="module", params=tiny_models.ARCHITECTURES)
def started(request, tmp_path_factory):
    """One step on the architecture's tiny model, packing planned where it can be."""
    architecture = request.param
    directory = tiny_models.make(tmp_path_factory.mktemp("base"), architecture)
    start = tiny_models.Started(
        tmp_path_factory.mktemp("runs"),
        directory,
        quantizer=QUANTIZERS.get(architecture, "nf4"),
        packing=architecture not in LEAKY,
    )
    start.architecture, start.directory = architecture, directory
    start.first_loss = start.step()
    return start


def test_plain_peft_reads_the_adapter_and_gives_the_same_logits(started):
    """The reference is transformers' model with PEFT's adapter, on weights set to what ours dequantize to."""
    ids = torch.arange(5, 35).reshape(2, 15) * 7 % 500
    # int8 rounds activations too, but in evaluation only.
    ours = started.logits(ids, training=started.plan.quantizer == "int8")
    held, original = started.held(), tiny_models.plain(started.directory)
    for name, value in held.items():
        weight = original.get_parameter(name)
        weight = weight.T if tiny_models.is_transposed(original, name) else weight
        assert (value - weight).norm() < 0.16 * weight.norm(), name
    reference = tiny_models.plain(started.directory, held, started.finish())
    with torch.no_grad():
        theirs = reference(input_ids=ids).logits
        with reference.disable_adapter():
            base = reference(input_ids=ids).logits
    assert (base - theirs).abs().max() > 0.01 * base.std()  # the adapter is there to be compared
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


def test_packed_loss_equals_unpacked_loss(started):
    """The reference is each document in a row of its own: loss within 1e-6, and so the gradient."""
    if started.architecture in LEAKY:
        pytest.skip("packing is refused for it")
    rows = started.run.data.train[:3]
    losses, norms = [], []
    for batch in (stream.collate([rows], 0), stream.collate([[row] for row in rows], 0)):
        loss = started.loss(batch)
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in started.built.trainable.values()]).item())
        losses.append(loss.item())
        started.runtime.discard_step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("architecture", LEAKY)
def test_an_architecture_that_mixes_packed_documents_is_refused(architecture, tmp_path):
    directory = tiny_models.make(tmp_path / "base", architecture)
    with pytest.raises(RunError, match="does not keep packed documents apart"):
        tiny_models.Started(tmp_path, directory, packing=True)


def test_what_makes_the_architecture_different_matters(started, tmp_path):
    """Switched off, it changes the logits: so a reader that ignored it would be seen above."""
    off = SWITCHED_OFF.get(started.architecture)
    if off is None:
        pytest.skip("what makes it different is its code, not a setting")
    ids = torch.arange(5, 45).reshape(1, 40) * 7 % 500
    model = tiny_models.plain(started.directory)
    with torch.no_grad():
        as_it_is = model(input_ids=ids).logits
        changed = type(model)(type(model.config).from_dict({**model.config.to_dict(), **off}))
        changed.load_state_dict(model.state_dict(), strict=False)
        assert (changed.eval()(input_ids=ids).logits - as_it_is).abs().max() > 0.01 * as_it_is.std()


SWITCHED_OFF = {
    "mistral": {"sliding_window": None},
    "qwen2": {"layer_types": ["full_attention"] * 2},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"layer_types": ["full_attention"] * 2},
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "granite": {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
    },
    "smollm3": {"no_rope_layers": [1, 1]},
    "llama": {"attention_bias": False},
    "gpt_neox": {"use_parallel_residual": False},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
    "granitemoe": {"residual_multiplier": 1.0},
    **{mixture: {"num_experts_per_tok": 1} for mixture in ("mixtral", "qwen2_moe", "olmoe")},
}
