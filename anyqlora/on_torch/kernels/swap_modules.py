"""Modules that run on our kernels, in the place of a model's own ones that compute the same."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anyqlora.on_torch._compat import attention_implementation, attention_replaced
from anyqlora.on_torch.kernels import reference

FORMS = ((0.0, False), (1.0, True), (0.0, True))  # of norms, as (offset, is_late)
MLP, PROJECTIONS = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
CAPTURING = "anyqlora_capturing"  # of attention, in transformers' table, while a module is tried
ROUNDINGS = {
    torch.bfloat16: 2**-6,
    torch.float16: 2**-9,
    torch.float32: 1e-4,
}  # of the largest number: how near is near


class KernelSet(NamedTuple):
    """What computes in the place of the functions of the same names in reference.py."""

    rms_norm: Callable
    rotate: Callable
    swiglu: Callable


def kernel_set(name: str) -> KernelSet:
    if name == "native":
        from anyqlora.on_torch.kernels.cpu.bindings import rms_norm, rotate, swiglu
    else:
        from anyqlora.on_torch.kernels.gpu.rms_norm import rms_norm
        from anyqlora.on_torch.kernels.gpu.rope import rotate, rotate_as_models
        from anyqlora.on_torch.kernels.gpu.swiglu import swiglu

        rotate = rotate_as_models if name == "exact" else rotate
    return KernelSet(rms_norm, rotate, swiglu)


class FastModule(nn.Module):
    """A module that has all that another has - the same weights, children, hooks and settings, not copies - and another
    forward.
    """

    @classmethod
    def of(cls, module: nn.Module):
        new = cls.__new__(cls)
        new.__dict__.update(module.__dict__)
        return new


class FastRMSNorm(FastModule):
    """A root-mean-square norm; `form` is (offset, is_late) of rms_norm, which `compute` is."""

    compute: Callable
    form: tuple[float, bool]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return self.compute(x, self.weight, eps, *self.form)


class FastGatedMLP(FastModule):
    """down(compute(gate x, up x)), where that is silu(gate x) * up x."""

    compute: Callable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.compute(self.gate_proj(x), self.up_proj(x)))


class RotaryAngles(tuple):
    """(cosines, sines) [B, T, D], rounded as a rotary module gives them and as a model's own attention takes them, with
    the same in float32 as `exact`, by which FastAttention rotates. A decoder hands on to its layers what its rotary
    module has given.
    """

    exact: tuple[torch.Tensor, torch.Tensor]

    def __new__(cls, angles: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor]):
        new = super().__new__(cls, angles)
        new.exact = exact
        return new


class FastAttention(FastModule):
    """Attention with rotary positions, q and k normed per head where the module has such norms; the product itself
    stays transformers'.

    `attend_options` is what else the module asks of the product, such as its window; `rotate` rotates queries and keys.
    """

    attend_options: dict
    rotate: Callable

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings=None,
        attention_mask=None,
        past_key_values=None,
        **options,
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (
            project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # [B, T, H, D]
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        angles = position_embeddings.exact if isinstance(position_embeddings, RotaryAngles) else position_embeddings
        q, k = (self.rotate(x, *angles).transpose(1, 2) for x in (q, k))
        v = v.transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[attention_implementation(self.config)]
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **{**options, **self.attend_options}
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


# ------------------------------------------------------------------------------------------- which modules they replace


def install(model: nn.Module, kernels: str) -> list[str]:
    """Put ours in the place of the modules that compute the same: attention for `exact`, norms and gates too for
    `triton` and `native`.

    Each module is asked, not its name: it and ours compute something small, and only where the same comes out is it
    replaced. The model has to be evaluating. Returns a line for each kind that looks like one of them and is left as it
    is.
    """
    if kernels == "portable":
        return []
    unchanged: Counter[str] = Counter()
    ours = kernel_set(kernels)
    sample = partial(_sample, model.get_input_embeddings().weight)
    finders = (
        (_attention,) if kernels == "exact" else (_norm, _gated_mlp, _attention)
    )  # norms first: attention may hold some
    for find in finders:
        for name, module in list(model.named_modules()):
            fast, why = find(module, sample, ours)
            if fast is not None:
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, fast)
            elif why:
                unchanged[f"{type(module).__name__} runs as it is: {why}"] += 1
    if kernels != "exact" and any(isinstance(module, FastAttention) for module in model.modules()):
        for module in model.get_decoder().modules():
            if type(module).__name__.endswith("RotaryEmbedding") and not _note_angles(module, sample):
                unchanged[f"{type(module).__name__} gives no float32 angles: it is no rotation that is known here"] += 1
    return [f"{line} ({count} modules)" for line, count in unchanged.items()]


def _norm(module: nn.Module, sample, ours: KernelSet) -> tuple[FastRMSNorm | None, str]:
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, FastRMSNorm):
        return None, ""
    weight = getattr(module, "weight", None)
    if (
        not isinstance(weight, torch.Tensor)
        or weight.ndim != 1
        or not (hasattr(module, "variance_epsilon") or hasattr(module, "eps"))
    ):
        return None, "it has other weights than a norm of one axis"
    random_weight = {
        "weight": sample(*weight.shape).to(weight.dtype)
    }  # weights that are all alike would not tell the forms apart
    x = sample(2, len(weight), seed=1)
    theirs = _output(torch.func.functional_call, module, random_weight, (x,))
    for form in FORMS:
        new = FastRMSNorm.of(module)
        new.form, new.compute = form, reference.rms_norm
        if _is_same(_output(torch.func.functional_call, new, random_weight, (x,)), theirs):
            new.compute = ours.rms_norm
            return _if_near(new, _output(torch.func.functional_call, new, random_weight, (x,)), theirs)
    return None, "it is no norm that is known here"


def _gated_mlp(module: nn.Module, sample, ours: KernelSet) -> tuple[FastGatedMLP | None, str]:
    if isinstance(module, FastGatedMLP) or not type(module).__name__.endswith("MLP"):
        return None, ""
    if not (set(MLP) <= dict(module.named_children()).keys() and hasattr(module, "act_fn")):
        return None, "its parts are others"
    x, new = sample(1, 2, module.gate_proj.in_features), FastGatedMLP.of(module)
    with _picking(module, MLP):
        theirs, new.compute = _output(module, x), reference.swiglu
        if not _is_same(_output(new, x), theirs):
            return None, "its gate is not silu(gate x) * up x"
        new.compute = ours.swiglu
        return _if_near(new, _output(new, x), theirs)


def _attention(module: nn.Module, sample, ours: KernelSet) -> tuple[FastAttention | None, str]:
    needed = ("head_dim", "layer_idx", "scaling", "config", "attention_dropout")
    if isinstance(module, FastAttention) or not type(module).__name__.endswith("Attention"):
        return None, ""
    if not (set(PROJECTIONS) <= dict(module.named_children()).keys() and all(hasattr(module, name) for name in needed)):
        return None, "its parts are others"
    implementation = attention_implementation(module.config)
    if implementation not in ALL_ATTENTION_FUNCTIONS:
        return None, f"its attention is {implementation}"
    x = sample(1, 4, module.q_proj.in_features)
    angles, half_angles = (
        [sample(1, 4, width, seed=seed) for seed in (1, 2)] for width in (module.head_dim, module.head_dim // 2)
    )  # any numbers: no angle has to be one
    new = FastAttention.of(module)
    new.rotate = ours.rotate
    with _picking(module, PROJECTIONS):
        theirs, new.attend_options = _captured_options(module, x, position_embeddings=angles, attention_mask=None)
        if not _is_same(_output(new, x, position_embeddings=angles, attention_mask=None), theirs):
            return None, "it does more than rotate and attend"
        if (
            _output(module, x, position_embeddings=half_angles, attention_mask=None) is not None
        ):  # of Nemotron's and GLM's, cos says how much
            return None, "it may rotate a part of each head"
    return new, ""


def _note_angles(module: nn.Module, sample) -> bool:
    """Let a rotary module that gives cosines and sines in 16 bits give them in float32, too: see RotaryAngles.

    Rounded to bf16 they are off by up to 0.4 %, at each step alike, and what a token sees depends on where a text
    begins (Wang et al. 2024, arXiv 2411.13476). False where what it gives is anything but rounded.
    """
    x, layer_types = sample(1, 4, 1), sorted({*(getattr(getattr(module, "config", None), "layer_types", None) or ())})
    positions, pairs = torch.arange(4, device=x.device)[None], []
    for kind in ((), *((kind,) for kind in layer_types)):
        with contextlib.suppress(Exception):  # a module that is not called like this fails in its own way
            pairs.append((module(x, positions, *kind), module(x.float(), positions, *kind)))
    if not pairs or not all(_is_rounded(*both) for both in pairs):
        return False
    if any(angles.dtype != torch.float32 for given, _ in pairs for angles in given):
        module.register_forward_hook(_with_exact_angles, with_kwargs=True)
    return True


def _is_rounded(angles, exact) -> bool:
    """Whether both are cosines and sines, and the former are the latter, rounded."""
    pairs = all(
        isinstance(both, tuple) and len(both) == 2 and all(isinstance(x, torch.Tensor) for x in both)
        for both in (angles, exact)
    )
    return pairs and all(
        whole.dtype == torch.float32 and torch.equal(rounded, whole.to(rounded.dtype))
        for rounded, whole in zip(angles, exact, strict=True)
    )


def _with_exact_angles(module: nn.Module, given: tuple, options: dict, angles: tuple) -> RotaryAngles:
    x = given[0] if given else options["x"]  # of which it reads dtype, device and shape
    stand_in = x.new_zeros((), dtype=torch.float32).expand(x.shape)
    exact = module.forward(stand_in, *given[1:], **options) if given else module.forward(**{**options, "x": stand_in})
    return RotaryAngles(angles, exact)


class ColumnPicker(nn.Module):
    """Stands for a linear: each number that comes out is one that went in. No weight is read."""

    def __init__(self, linear: nn.Module, seed: int) -> None:
        super().__init__()
        self.index = torch.randint(
            linear.in_features, (linear.out_features,), generator=torch.Generator().manual_seed(seed)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.index.to(x.device)]


@contextlib.contextmanager
def _picking(module: nn.Module, linears: tuple[str, ...]) -> Iterator[None]:
    """Within, these linears of the module, and of what is in its place, only pick: what they are made of is not in
    question, and reading all quantized weights two or three times takes longer than all else here.
    """
    originals = {name: getattr(module, name) for name in linears}
    for seed, (name, linear) in enumerate(originals.items()):
        setattr(module, name, ColumnPicker(linear, seed))
    try:
        yield
    finally:
        for name, linear in originals.items():
            setattr(module, name, linear)


def _sample(like: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers on the device and of the dtype of `like`: what comes out of the embedding goes into the blocks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def _output(function, *arguments, **options) -> torch.Tensor | None:
    """What comes out, the first of several things; None where it is not called like this."""
    try:
        out = function(*arguments, **options)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    return out[0] if isinstance(out, tuple) else out


def _captured_options(module: nn.Module, x: torch.Tensor, **options) -> tuple[torch.Tensor | None, dict]:
    """What comes out of an attention module, and the options that it gives the product beside the usual ones."""
    before, options_given = attention_implementation(module.config), {}

    def capture(module, q, k, v, mask, **given):
        options_given.update(given)
        return ALL_ATTENTION_FUNCTIONS[before](module, q, k, v, mask, **given)

    AttentionInterface.register(CAPTURING, capture)
    with attention_replaced(module.config, CAPTURING):
        out = _output(module, x, **options)
    return out, {name: value for name, value in options_given.items() if name not in ("dropout", "scaling")}


def _is_same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    return ours is not None and theirs is not None and ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _if_near(new: FastModule, ours: torch.Tensor | None, theirs: torch.Tensor) -> tuple[FastModule | None, str]:
    """`new`, unless its kernel computes something else on this device."""
    is_far = ours is None or not (ours - theirs).abs().max() <= ROUNDINGS[theirs.dtype] * theirs.abs().max()
    return (None, "the kernel for it gives something else on this device") if is_far else (new, "")
