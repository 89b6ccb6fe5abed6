"""The loss: the sum of the trained tokens' negative log-likelihoods, and the same without logits of the tokens that are
not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from anyqlora.core.errors import RunError
from anyqlora.data.stream import Batch
from anyqlora.on_torch.device_batch import DeviceBatch
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels.cpu.bindings import QuantizedHead, quantize_lm_head
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform, cross_entropy
from anyqlora.on_torch.kernels.dropout import TokenDropout, current_tokens
from anyqlora.on_torch.linears import blocks
from anyqlora.on_torch.unpadded import TOKENS

PROBE_RANGE = 64.0  # logits from minus to plus so much are shown to a model, to see what it makes of them
MAX_TRAINED_PART = 0.9  # part of the tokens that are trained, from which on picking them costs what it saves
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest logit: how near they are; in 16 bits 0.03


def token_loss(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum over trained tokens of -log p(next token), float32, a scalar with gradient."""
    inputs = DeviceBatch.padded(batch, device)
    logits = inputs.forward(model).logits  # [B, T, V]
    logits = logits.flatten(0, 1).index_select(0, inputs.trained).float()  # [N, V]: only these rows need float32
    return F.cross_entropy(logits, inputs.targets[inputs.trained], reduction="sum")


@dataclass(frozen=True)
class LossSpec:
    """How a run computes its loss: decided once, from the plan and from what the model turned out to be. `make_loss`
    builds it.

    The value is `token_loss`'s in every case, within rounding.
    """

    chunk_tokens: int = (
        0  # tokens whose logits are in memory at a time; 0: those of all tokens, by the model's own forward
    )
    transform: LogitTransform = LogitTransform()  # what the model does to its head's product
    is_native: bool = False  # the logits of a chunk become losses by a C kernel
    is_fused: bool = False  # head and cross-entropy are one C kernel, which needs no memory for logits
    is_unpadded: bool = False  # all documents of a batch lie in one row
    few_lengths: bool = True  # unpadded rows have one of few lengths, since oneDNN compiles its products for each
    narrows_last_mlp: bool = False  # the last block's MLP runs on trained tokens only
    int8_gradient: bool = False  # the gradient of the head's input comes from weights in 8 bits


@dataclass(frozen=True, eq=False)
class TrainedTokenLoss:
    """`token_loss`, with the output head on trained tokens only and `spec.chunk_tokens` of them at a time: what Liger
    calls a fused linear cross-entropy. Most runs take it.

    A hook takes the head's input and gives it none, so that the model's own forward makes no logits. `last_mlp`, where
    there is one, runs on trained tokens only, too: no other token's output of it reaches the loss. `quantized_head`:
    the head's weights for a gradient in 8 bits.
    """

    spec: LossSpec
    head: nn.Linear
    last_mlp: nn.Module | None = None
    quantized_head: QuantizedHead | None = None

    def __call__(self, model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
        return self.from_hidden(*self.hidden(model, batch, device))

    def prepare(self, batch: Batch, device: torch.device) -> DeviceBatch:
        """What the model is given of a batch."""
        if self.spec.is_unpadded:
            return DeviceBatch.unpadded(batch, device, self.spec.few_lengths)
        return DeviceBatch.padded(batch, device)

    def hidden(self, model: nn.Module, batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The head's input of the trained tokens, [N, H], and their targets [N]."""
        inputs = self.prepare(batch, device)
        skips_untrained = self.last_mlp is not None and 0 < len(inputs.trained) < MAX_TRAINED_PART * len(inputs.targets)
        with (
            HeadInputCapture(self.head) as capture,
            only_tokens(self.last_mlp, inputs.trained) if skips_untrained else contextlib.nullcontext(),
        ):
            inputs.forward(model)
        return capture.hidden.flatten(0, 1).index_select(0, inputs.trained), inputs.targets[inputs.trained]

    def from_hidden(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of targets [N] by the head's input [N, H]."""
        return cross_entropy(
            hidden,
            self.head.weight,
            self.head.bias,
            targets,
            transform=self.spec.transform,
            rows=self.spec.chunk_tokens,
            is_native=self.spec.is_native,
            is_fused=self.spec.is_fused,
            quantized=self.quantized_head,
        )


Loss = Callable[[nn.Module, Batch, torch.device], torch.Tensor]  # sum over trained tokens: token_loss's contract


def make_loss(spec: LossSpec, model: nn.Module, quantized_head: QuantizedHead | None = None) -> Loss:
    """The loss that `spec` describes, of `model`'s own head and last MLP. `quantized_head`: the head's weights in 8
    bits, if they are at hand; they are packed here otherwise, where `spec` wants them."""
    if not spec.chunk_tokens:
        return token_loss
    head = model.get_output_embeddings()
    if spec.int8_gradient and quantized_head is None:
        quantized_head = quantize_lm_head(head.weight.detach())
        if quantized_head is None:
            raise RunError("the output head's weights cannot be packed in 8 bits here")
    return TrainedTokenLoss(
        spec,
        head,
        last_mlp(model) if spec.narrows_last_mlp else None,
        quantized_head if spec.int8_gradient else None,
    )


class HeadInputCapture:
    """While it lasts, a head's input [B, T, H] is kept as `hidden`, and its output is `instead`, or that of no token at
    all."""

    def __init__(self, head: nn.Linear, instead: torch.Tensor | None = None):
        self.head, self.instead, self.hidden, self.output, self.calls = head, instead, None, None, 0

    def __enter__(self) -> HeadInputCapture:
        self.handles = [self.head.register_forward_pre_hook(self._take), self.head.register_forward_hook(self._give)]
        return self

    def __exit__(self, kind, error, trace) -> None:
        for handle in self.handles:
            handle.remove()

    def _take(self, head, arguments):
        self.hidden, self.calls = arguments[0], self.calls + 1
        return arguments[0][:, :0], *arguments[1:]

    def _give(self, head, arguments, output):
        self.output = output if self.instead is None else self.instead.to(output.dtype)
        return self.output


@contextlib.contextmanager
def only_tokens(module: nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """While it lasts, `module` sees those of its tokens [B, T, H] that lie at `positions` [N] of B * T; the others'
    output is zero. What it drops follows from these tokens' keys."""
    before = []  # shapes and keys of all its tokens

    def pick(module, arguments):
        x, *others = arguments
        keys = current_tokens.keys
        before.append((x.shape, keys))
        current_tokens.set(None if keys is None else keys.flatten()[positions][None])
        return x.flatten(0, 1).index_select(0, positions)[None], *others

    def put_back(module, arguments, output):
        shape, keys = before.pop()
        current_tokens.set(keys)
        return output.new_zeros(shape.numel() // shape[-1], shape[-1]).index_copy(0, positions, output[0]).view(shape)

    handles = [module.register_forward_pre_hook(pick), module.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def last_mlp(model: nn.Module) -> nn.Module | None:
    """The MLP of the last block, where it is known by that name."""
    *_, last = blocks(model) or [None]
    mlp = getattr(last, "mlp", None)
    return mlp if isinstance(mlp, nn.Module) else None


def can_narrow_last_mlp(model: nn.Module) -> bool:
    """Whether what the last block's MLP makes of one token is known to reach no other token's logits.

    The model's own forward is run with that MLP on some of the tokens, and their inputs of the head are compared. Not
    for a block that is recomputed, since its second run has to be its first; nor for one whose dropout does not
    follow from tokens, or a plan's choice to recompute would change what each token draws.
    """
    mlp, head = last_mlp(model), model.get_output_embeddings()
    if mlp is None or any(
        isinstance(part, nn.Dropout) and part.p and not isinstance(part, TokenDropout) for part in mlp.modules()
    ):
        return False
    if model.is_gradient_checkpointing and blocks(model)[-1].gradient_checkpointing:
        return False
    device = head.weight.device
    ids, positions = torch.arange(TOKENS, device=device)[None], torch.tensor([1, 4, 5], device=device)
    with evaluating(model), HeadInputCapture(head) as capture:
        try:
            model(input_ids=ids, use_cache=False)
            whole = capture.hidden[0, positions]
            with only_tokens(mlp, positions):
                model(input_ids=ids, use_cache=False)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return False
    return _near(capture.hidden[0, positions], whole)


def logit_transform(model: nn.Module) -> tuple[LogitTransform | None, str]:
    """(what `model` does to its head's product, ""), or (None, why the head cannot be used by itself)."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None, f"its output head is {type(head).__name__}, not a plain linear layer"
    with evaluating(model):
        try:
            transform = detect_logit_transform(model, head)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return None, f"it cannot run without logits: {error}"
    return transform, "" if transform else "what it does to logits after its head is not known here"


def detect_logit_transform(model: nn.Module, head: nn.Linear) -> LogitTransform | None:
    """What `model` does to its head's product: scales it, caps it by tanh, or nothing; None where it is anything else.

    Its own forward is run on some tokens with known logits in place of the head's, and what comes out is compared.
    """
    device = head.weight.device
    ids = torch.arange(TOKENS, device=device)[None]  # [1, TOKENS]
    known = torch.linspace(-PROBE_RANGE, PROBE_RANGE, head.out_features, device=device).expand(1, TOKENS, -1)
    with HeadInputCapture(head, known) as capture:
        logits = model(input_ids=ids, use_cache=False).logits
    if capture.calls != 1 or logits.shape != known.shape or capture.hidden.shape[:2] != ids.shape:
        return None
    product = capture.output.to(logits.dtype)
    candidates = _candidates(model, product, logits)
    return next((transform for transform in candidates if _near(transform(product), logits)), None)


def _candidates(model: nn.Module, product: torch.Tensor, logits: torch.Tensor) -> list[LogitTransform]:
    """What may follow: a cap that the model's configuration states, or the factor between the head's product and the
    logits."""
    text = model.config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    scale = float(logits[0, 0, -1]) / float(product[0, 0, -1])
    stated = [1 / value for name in ("logits_scaling", "logit_scale") if (value := getattr(text, name, None))]
    exact = [s for value in stated for s in (value, 1 / value) if abs(s / scale - 1) < 0.02] if scale else []
    return [LogitTransform(), *([LogitTransform(1.0, float(cap))] if cap else []), *map(LogitTransform, exact)]


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    near = NEAR.get(theirs.dtype, 0.03)
    ours, theirs = (x.cpu().double() for x in (ours, theirs))  # there are devices without float64
    largest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= near * largest
