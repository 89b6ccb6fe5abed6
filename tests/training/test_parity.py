"""Our loop against a hand-written float32 loop over transformers and PEFT on the same rows."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from anyqlora.config.resolve import resolve
from anyqlora.config.schema import TrainConfig
from anyqlora.data import dataset, tokenizer
from anyqlora.data.stream import BatchStream
from anyqlora.models.architectures import DEMO_BASE
from anyqlora.on_torch.quantizers.bnb import Nf4
from tests.support import reference_loop, runs

STEPS, LR = 20, 2e-4
SETTINGS = {
    "dataset": "demo",
    "lora_dropout": 0,
    "max_steps": STEPS,
    "lr": LR,
    "precision": "fp32",
    "context_length": 128,
    "weight_decay": 0.01,
    "lora_rank": 8,
    "lora_alpha": 16,
    "warmup_steps": 3,
    "save_steps": 0,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A random Llama with the embedded base's tokenizer, grouped queries, untied head."""
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    words = tokenizer.load_tokenizer("demo")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words.save_pretrained(directory)
    return directory


def reference(base, settings, *, packing, weights=None):
    """The reference's losses, norms, adapter and start on the rows of each step of our stream."""
    config = resolve({**settings, "model_name": str(base)}, environ={}, origin="test")
    words = tokenizer.load_tokenizer(str(base))
    stream = BatchStream(
        dataset.load_data(config, words).train,
        batch_size=config.batch_size,
        num_epochs=1,
        max_steps=STEPS,
        seed=config.seed,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        packing=packing,
        context_length=128,
        pad_id=0,
    )
    by_name = {e.where: (e.ids, e.trained) for e in dataset.load_data(config, words).train}
    steps = [[by_name[row] for batch in stream[step] for row in batch.rows] for step in range(STEPS)]
    model = reference_loop.peft_model(base, rank=8, alpha=16, seed=config.seed, weights=weights)
    start = reference_loop.adapter(model)
    losses, norms = reference_loop.train(model, steps, lr=LR, total_steps=STEPS, warmup=3, clip=1.0, weight_decay=0.01)
    return losses, norms, reference_loop.adapter(model), start


def compare(directory, expected, *, loss, norm, adapter):
    losses, norms, reference_adapter, start = expected
    ours = runs.metrics(directory)
    assert len(ours) == STEPS
    print(
        "loss",
        max(abs(m["loss"] / other - 1) for m, other in zip(ours, losses, strict=True)),
        "norm",
        max(abs(m["grad_norm"] / other - 1) for m, other in zip(ours, norms, strict=True)),
        "adapter",
        runs.distance(reference_adapter, runs.adapter(directory), start),
    )
    np.testing.assert_allclose([m["loss"] for m in ours], losses, rtol=loss)
    np.testing.assert_allclose([m["grad_norm"] for m in ours], norms, rtol=norm)
    assert runs.distance(reference_adapter, runs.adapter(directory), start) < adapter


@pytest.mark.parametrize(
    "batch, accumulation, packing",
    [
        pytest.param(4, 1, False, id="accumulation1-unpacked"),
        pytest.param(4, 1, True, id="accumulation1-packed", marks=pytest.mark.slow),
        pytest.param(2, 4, False, id="accumulation4-unpacked", marks=pytest.mark.slow),
        pytest.param(2, 4, True, id="accumulation4-packed"),
    ],
)
def test_float32_equals_the_hand_written_loop(base, tmp_path, batch, accumulation, packing):
    settings = {**SETTINGS, "batch_size": batch, "gradient_accumulation_steps": accumulation, "train_type": "lora"}
    directory = runs.run(tmp_path, model_name=str(base), packing=packing, **settings)
    compare(directory, reference(base, settings, packing=packing), loss=1e-6, norm=1e-5, adapter=1e-4)


def test_nf4_equals_the_hand_written_loop_on_the_dequantized_weights(base, tmp_path):
    settings = {**SETTINGS, "batch_size": 2, "gradient_accumulation_steps": 2, "train_type": "qlora"}
    directory = runs.run(tmp_path, model_name=str(base), **settings)
    quantizer = Nf4(TrainConfig(), torch.float32)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = {
        name: quantizer.unpack(*quantizer.pack(module.weight))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    compare(directory, reference(base, settings, packing=False, weights=weights), loss=1e-5, norm=1e-5, adapter=1e-4)


def test_the_reference_would_see_a_wrong_normalisation(tmp_path):
    """The comparison can fail: the mean of micro-batch means, which other tools take, is far outside the bound."""
    settings = {
        **SETTINGS,
        "batch_size": 1,
        "gradient_accumulation_steps": 4,
        "train_type": "lora",
        "max_steps": 1,
        "model_name": "demo",
    }
    ours = runs.metrics(runs.run(tmp_path, **settings))
    config = resolve(settings, environ={}, origin="test")
    rows = dataset.load_data(config, tokenizer.load_tokenizer("demo")).train
    stream = BatchStream(
        rows,
        batch_size=1,
        gradient_accumulation_steps=4,
        num_epochs=1,
        max_steps=1,
        seed=config.seed,
        packing=False,
        context_length=128,
        pad_id=0,
    )
    by_name = {e.where: (e.ids, e.trained) for e in rows}
    model = reference_loop.peft_model(DEMO_BASE, rank=8, alpha=16, seed=config.seed)
    step = [by_name[b.rows[0]] for b in stream[0]]
    constant = {"lr": 0.0, "total_steps": 1, "warmup": 0, "clip": 1.0, "weight_decay": 0.0}
    means = [reference_loop.train(model, [[row]], **constant)[0][0] for row in step]
    np.testing.assert_allclose(ours[0]["loss"], reference_loop.train(model, [step], **constant)[0][0], rtol=1e-6)
    assert abs(np.mean(means) / ours[0]["loss"] - 1) > 1e-3


@pytest.mark.parametrize(
    "steps, batch, lr",
    [pytest.param(24, 4, 2e-3, id="quick"), pytest.param(50, 8, 1e-3, id="full", marks=pytest.mark.slow)],
)
def test_equals_hugging_face_trainer_in_float32(steps, batch, lr, tmp_path):
    ours, theirs = against_trainer(tmp_path, "fp32", steps, batch, lr)
    print("largest difference", np.abs(ours / theirs - 1).max(), "loss", theirs[0], "->", theirs[-5:].mean())
    assert theirs[-5:].mean() < theirs[0] / 2
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.slow
def test_equals_hugging_face_trainer_in_bfloat16(tmp_path):
    ours, theirs = against_trainer(tmp_path, "bf16_autocast", steps=50, batch=8, lr=1e-3)
    print(
        "largest difference", np.abs(ours / theirs - 1).max(), "means differ by", abs(ours.mean() / theirs.mean() - 1)
    )
    assert theirs[-5:].mean() < theirs[0] / 2
    np.testing.assert_allclose(ours, theirs, rtol=0.02)
    assert abs(ours.mean() / theirs.mean() - 1) < 1e-3


def against_trainer(tmp_path, precision, steps, batch, lr) -> tuple[np.ndarray, np.ndarray]:
    """Losses of the steps of ours and of transformers' Trainer on the embedded base and task: same rows, order, start,
    AdamW.
    """
    settings = {
        "model_name": "demo",
        "dataset": "demo",
        "train_type": "lora",
        "precision": precision,
        "batch_size": batch,
        "max_steps": steps,
        "gradient_accumulation_steps": 2,
        "lr": lr,
        "lora_dropout": 0,
        "weight_decay": 0.01,
        "lr_scheduler": "linear",
        "warmup_steps": 0,
        "context_length": 128,
        "lora_rank": 8,
        "lora_alpha": 16,
        "save_steps": 0,
    }
    ours = np.array([m["loss"] for m in runs.metrics(runs.run(tmp_path, **settings))])
    config = resolve(settings, environ={}, origin="test")
    rows = dataset.load_data(config, tokenizer.load_tokenizer("demo")).train
    stream = BatchStream(
        rows,
        batch_size=batch,
        gradient_accumulation_steps=2,
        num_epochs=1,
        max_steps=steps,
        seed=config.seed,
        packing=False,
        context_length=128,
        pad_id=0,
    )
    by_name = {e.where: e for e in rows}
    ordered = [by_name[row] for step in range(steps) for b in stream[step] for row in b.rows]

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(ordered)

    def collate(examples):
        width = max(len(e.ids) for e in examples)
        ids = torch.zeros(len(examples), width, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for i, e in enumerate(examples):
            ids[i, : len(e.ids)] = torch.from_numpy(e.ids)
            labels[i, : len(e.ids)] = torch.from_numpy(np.where(e.trained, e.ids, -100))
            mask[i, : len(e.ids)] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    model = reference_loop.peft_model(DEMO_BASE, rank=8, alpha=16, seed=config.seed)
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        learning_rate=lr,
        lr_scheduler_type="linear",
        warmup_steps=0,
        weight_decay=0.01,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=precision != "fp32",
        remove_unused_columns=False,
        disable_tqdm=True,
        optim="adamw_torch",
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=ordered, data_collator=collate)
    trainer.train()
    theirs = np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(ours) == len(theirs) == steps
    return ours, theirs
