"""The loss: the sum of the trained tokens' negative log-likelihoods, and the same without logits of the tokens that are not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from anyqlora.data.stream import Batch
from anyqlora.on_torch.generate import evaluating
from anyqlora.on_torch.kernels.cpu.bindings import QuantizedHead
from anyqlora.on_torch.kernels.cross_entropy import LogitTransform, cross_entropy
from anyqlora.on_torch.linears import blocks
from anyqlora.on_torch.unpadded import TOKENS, padded, trained_positions

PROBE = 64.0  # logits from minus to plus so much are shown to a model, to see what it makes of them
NARROWED = 0.9  # part of the tokens that are trained, from which on picking them costs what it saves
NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest logit: how near they are; in 16 bits 0.03


def token_loss(model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum over trained tokens of -log p(next token), float32, a scalar with gradient."""
    inputs, targets = padded(batch, device)
    logits = model(**inputs, use_cache=False).logits  # [B, T, V]
    kept = trained_positions(targets)  # [N]: only these rows need float32
    logits = logits.flatten(0, 1).index_select(0, kept).float()  # [N, V]
    return F.cross_entropy(logits, targets[kept], reduction="sum")


class TrainedTokenLoss:
    """`token_loss`, with the output head on trained tokens only and `rows` of them at a time.

    A hook takes the head's input and gives it none, so that the model's own forward makes no logits; what the model does to logits
    after its head is `after`. `inputs` says what the model is given for a batch: flat.padded or flat.flat. `last_mlp`, where it is set,
    runs on trained tokens only, too: no other token's output of it reaches the loss. `quantized_head`, where it is set: the head's weights, for a gradient in 8 bits.
    """

    def __init__(
        self, head: nn.Linear, after: LogitTransform, rows: int, is_native: bool = False, is_fused: bool = False
    ):
        self.head, self.after, self.rows, self.is_native, self.is_fused, self.inputs = (
            head,
            after,
            rows,
            is_native,
            is_fused,
            padded,
        )
        self.last_mlp: nn.Module | None = None
        self.quantized_head: QuantizedHead | None = None

    def __call__(self, model: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
        return self.of(*self.seen(model, batch, device))

    def seen(self, model: nn.Module, batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head sees of the trained tokens, [N, H], and their targets [N]."""
        inputs, targets = self.inputs(batch, device)
        kept = trained_positions(targets)  # [N]
        pays = self.last_mlp is not None and 0 < len(kept) < NARROWED * len(targets)
        with (
            HeadInputCapture(self.head) as watched,
            without_padding_rows(self.last_mlp, kept) if pays else contextlib.nullcontext(),
        ):
            model(**inputs, use_cache=False)
        return watched.hidden.flatten(0, 1).index_select(0, kept), targets[kept]

    def of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(
            hidden,
            self.head.weight,
            self.head.bias,
            targets,
            transform=self.after,
            rows=self.rows,
            is_native=self.is_native,
            is_fused=self.is_fused,
            quantized=self.quantized_head,
        )


class HeadInputCapture:
    """While it lasts, a head's input [B, T, H] is kept as `hidden`, and its output is `instead`, or that of no token at all."""

    def __init__(self, head: nn.Linear, instead: torch.Tensor | None = None):
        self.head, self.instead, self.hidden, self.given, self.calls = head, instead, None, None, 0

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
        self.given = output if self.instead is None else self.instead.to(output.dtype)
        return self.given


@contextlib.contextmanager
def without_padding_rows(module: nn.Module, kept: torch.Tensor) -> Iterator[None]:
    """While it lasts, of the tokens [B, T, H] that come to `module` it sees those with the numbers `kept` [N] in B * T; the others get zeros."""
    shapes = []

    def pick(module, arguments):
        x, *others = arguments
        shapes.append(x.shape)
        return x.flatten(0, 1).index_select(0, kept)[None], *others

    def put_back(module, arguments, output):
        shape = shapes.pop()
        return output.new_zeros(shape.numel() // shape[-1], shape[-1]).index_copy(0, kept, output[0]).view(shape)

    handles = [module.register_forward_pre_hook(pick), module.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def last_mlp_chunked(model: nn.Module, head: nn.Linear) -> nn.Module | None:
    """The MLP of the last block, where what it makes of one token reaches no other token's logits; None where it is not known to be so.

    The model's own forward is run with that MLP on some of the tokens, and their inputs of the head are compared. A block that is
    recomputed is left as it is, since its second run has to be its first; so is one with dropout, or a plan's choice to recompute would
    change what each token draws.
    """
    *_, last = blocks(model) or [None]
    mlp = getattr(last, "mlp", None)
    if not isinstance(mlp, nn.Module) or any(isinstance(part, nn.Dropout) and part.p for part in mlp.modules()):
        return None
    if model.is_gradient_checkpointing and last.gradient_checkpointing:
        return None
    ids, kept = (
        torch.arange(TOKENS, device=head.weight.device)[None],
        torch.tensor([1, 4, 5], device=head.weight.device),
    )
    with evaluating(model), HeadInputCapture(head) as watched:
        try:
            model(input_ids=ids, use_cache=False)
            whole = watched.hidden[0, kept]
            with without_padding_rows(mlp, kept):
                model(input_ids=ids, use_cache=False)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
    return mlp if _near(watched.hidden[0, kept], whole) else None


def loss_from_model(model: nn.Module, rows: int) -> tuple[Callable, str]:
    """(the loss, why it is not the fast one or ""). Each architecture's own forward is asked what it does around its head."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return token_loss, f"its output head is {type(head).__name__}, not a plain linear layer"
    with evaluating(model):
        try:
            after = what_follows(model, head)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            return token_loss, f"it cannot run without logits: {error}"
    return (
        (TrainedTokenLoss(head, after, rows), "")
        if after
        else (token_loss, "what it does to logits after its head is not known here")
    )


def what_follows(model: nn.Module, head: nn.Linear) -> LogitTransform | None:
    """What `model` does to its head's product: scales it, caps it by tanh, or nothing; None where it is anything else.

    Its own forward is run on some tokens with known logits in place of the head's, and what comes out is compared.
    """
    device = head.weight.device
    ids = torch.arange(TOKENS, device=device)[None]  # [1, TOKENS]
    known = torch.linspace(-PROBE, PROBE, head.out_features, device=device).expand(1, TOKENS, -1)
    with HeadInputCapture(head, known) as watched:
        made = model(input_ids=ids, use_cache=False).logits
    if watched.calls != 1 or made.shape != known.shape or watched.hidden.shape[:2] != ids.shape:
        return None
    given = watched.given.to(made.dtype)
    return next((after for after in _candidates(model, given, made) if _near(after(given), made)), None)


def _candidates(model: nn.Module, given: torch.Tensor, made: torch.Tensor) -> list[LogitTransform]:
    """What may follow: a cap that the model's configuration states, or the factor between what was given and what was made."""
    text = model.config.get_text_config()
    cap = getattr(text, "final_logit_softcapping", None)
    scale = float(made[0, 0, -1]) / float(given[0, 0, -1])
    stated = [1 / value for name in ("logits_scaling", "logit_scale") if (value := getattr(text, name, None))]
    exact = [s for value in stated for s in (value, 1 / value) if abs(s / scale - 1) < 0.02] if scale else []
    return [LogitTransform(), *([LogitTransform(1.0, float(cap))] if cap else []), *map(LogitTransform, exact)]


def _near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    near = NEAR.get(theirs.dtype, 0.03)
    ours, theirs = (x.cpu().double() for x in (ours, theirs))  # there are devices without float64
    largest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= near * largest
