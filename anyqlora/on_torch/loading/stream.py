"""Weights from safetensors files into the model: read, quantize, place, one tensor at a time.

The full-precision model is never resident. Names and shapes in the files are those of the checkpoint, not of the module
(transformers' conversion mapping merges experts, splits fused projections, renames), so reading goes through
transformers' own loader, whose documented extension point for quantizers hands us each finished tensor.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.core.terminal import printable
from anyqlora.models.hub import check_safetensors
from anyqlora.on_torch.linears import float32_modules, linears
from anyqlora.on_torch.quantizers.experts import PackedExperts, expert_parameters

METHOD = "anyqlora"
LEFT_OUT = (
    1 / 20
)  # of the weights, embeddings aside, that a quantized model may keep as they are: convolutions, routers


@dataclass
class LoadPolicy:
    """What happens to each weight on its way in.

    `select_targets(model)` sees the model before any weight is read; `pack(name, module, weight) -> Parameter` packs a
    weight [out, in] in float32 or, where that is exact, bf16; `quantizer` says what modules hold them.
    """

    quantizer: object
    pack: Callable[[str, nn.Module, torch.Tensor], nn.Parameter]
    select_targets: Callable[[nn.Module], None]

    def __deepcopy__(self, memo) -> LoadPolicy:
        # transformers copies what its configurations hold; the quantizer and who packs for it are not its to copy.
        return self


@register_quantization_config(METHOD)
class _StreamConfig(QuantizationConfigMixin):
    """Carries a LoadPolicy through `from_pretrained`; it is never written to disk."""

    def __init__(self, policy: LoadPolicy | None = None, dtype: torch.dtype = torch.float32, **ignored):
        self.quant_method, self.policy, self.dtype = METHOD, policy, dtype
        self.failure: Exception | None = None

    def __deepcopy__(self, memo):
        return self  # transformers copies a model's configuration; see LoadPolicy


@register_quantizer(METHOD)
class StreamingQuantizer(HfQuantizer):
    """transformers' hook: it asks which parameters to quantize and passes each one as soon as it is read."""

    is_trainable = True

    def _process_model_before_weight_loading(self, model, **_):
        policy = self.quantization_config.policy
        policy.select_targets(model)
        self.directory = model.name_or_path
        self.transposed: set[str] = set()
        self.layers: dict[str, nn.Module] = {}
        for name, module in linears(model).items():
            if isinstance(module, Conv1D):
                self.transposed.add(name)
                bias = module.bias
                with torch.device("meta"):
                    module = nn.Linear(module.nx, module.nf)
                module.bias = bias
            self.layers[name] = policy.quantizer.empty_layer(module)
            model.set_submodule(name, self.layers[name])
        quantized = policy.quantizer.bits < 16
        self.experts = {
            name: PackedExperts(name, model.get_parameter(name).shape, policy.quantizer)
            for name in (expert_parameters(model) if quantized else ())
        }
        if quantized:
            refuse_what_stays(model, {*self.experts, *(f"{name}.weight" for name in self.layers)})
        for name, parameter in model.named_parameters():
            if (
                parameter.is_floating_point()
                and not float32_modules(model, name)
                and not (quantized and self.param_needs_quantization(model, name))
            ):
                parameter.data = parameter.data.to(self.quantization_config.dtype)

    def param_needs_quantization(self, model, param_name: str, **_) -> bool:
        owner, _, attribute = param_name.rpartition(".")
        return (attribute == "weight" and owner in self.layers) or param_name in self.experts

    def param_element_size(self, model, param_name: str, param: torch.Tensor) -> float:
        """Bytes per weight: on a GPU transformers reserves the whole model's memory by it before loading."""
        packed = self.param_needs_quantization(model, param_name)
        return self.quantization_config.policy.quantizer.bits / 8 if packed else param.element_size()

    def get_quantize_ops(self):
        return QuantizeOp(self)

    def _process_model_after_weight_loading(self, model, **_):
        for name, packed in self.experts.items():
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            delattr(module, attribute)  # the parameter
            setattr(module, attribute, packed)

    def is_serializable(self) -> bool:
        return False


class QuantizeOp(ConversionOps):
    """The last step of a weight's conversion: it becomes what the quantizer makes of it."""

    def __init__(self, stream: StreamingQuantizer):
        self.stream = stream

    def convert(self, input_dict, **_):
        try:
            return {name: self.quantize(name, input_dict.pop(name)) for name in list(input_dict)}
        except Exception as error:  # transformers would log it, go on, and raise another at the end
            self.stream.quantization_config.failure = error
            raise

    @torch.no_grad()
    def quantize(self, name: str, tensor) -> nn.Parameter:
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        if (
            not tensor.is_floating_point()
        ):  # whole numbers that a library made of a weight would be packed without a word, most of them as 0
            raise UsageError(
                f"{name} comes as {tensor.dtype}".replace("torch.", ""),
                where=self.stream.directory,
                cure="weights in bf16, fp16 or float32; and the versions that `python -m anyqlora doctor` asks for",
            )
        if name in self.stream.experts:
            self.stream.experts[name].fill(tensor)
            return nn.Parameter(torch.empty(0, device=tensor.device), requires_grad=False)
        owner = name.rpartition(".")[0]
        weight = tensor.T if owner in self.stream.transposed else tensor
        module = self.stream.layers[owner]
        if weight.shape != (module.out_features, module.in_features):
            raise UsageError(
                f"{name} has shape {list(weight.shape)} in the files and [{module.out_features}, {module.in_features}] "
                f"in the model",
                where=self.stream.directory,
                cure="a config.json and weights that belong together",
            )
        return self.stream.quantization_config.policy.pack(owner, module, weight)


def refuse_what_stays(model: nn.Module, packed: set[str]) -> None:
    """Raises NotBuilt when a large part of the model would silently stay in 16 bits, naming its largest parameter.

    Embeddings, the head and convolutions do stay, and are not counted.
    """
    kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    exempt = [model.get_output_embeddings(), *(module for module in model.modules() if isinstance(module, kinds))]
    exempt = {id(parameter) for module in exempt if module is not None for parameter in module.parameters()}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if id(parameter) not in exempt}
    left = {name: size for name, size in sizes.items() if name not in packed and model.get_parameter(name).ndim > 1}
    share = sum(left.values()) / max(1, sum(sizes.values()))
    if share > LEFT_OUT:
        name = max(left, key=left.get)
        raise NotSupported(
            f"{name} {list(model.get_parameter(name).shape)} and others like it, {share:.0%} of the weights of a "
            f"{model.config.model_type} model, are in no linear layer and would stay unquantized",
            cure="--quantizer none",
        )


def load_streamed(
    directory: str, policy: LoadPolicy, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """The causal LM of `directory`, its linear and expert weights through `policy`, everything else in `dtype`.

    Raises UsageError for files that are not this model's, NotBuilt for weights that cannot be quantized.
    """
    stream = _StreamConfig(policy, dtype)
    eager = (
        {"experts_implementation": "eager"} if policy.quantizer.bits < 16 else {}
    )  # the one that takes an expert at a time
    try:
        model = _from_pretrained(
            directory,
            trust_remote_code,
            dtype=exact_dtype(directory, dtype),
            device_map={"": device},
            quantization_config=stream,
            **eager,
        )
    except RuntimeError as error:
        raise (stream.failure or error) from None
    owned_weights(model)
    model.hf_quantizer.remove_quantization_config(model)
    model.config.dtype = AutoConfig.from_pretrained(
        directory, trust_remote_code=trust_remote_code
    ).dtype  # the files' own, for saving
    return model


def meta_model(model: nn.Module, quantizer) -> dict:
    """What another process must know of a model that was read to make the same without its values, JSON-able: which
    layers the quantizer holds, and which experts.
    """
    return {
        "layers": [
            name
            for name, module in linears(model, quantizer.module_type).items()
            if isinstance(module, quantizer.module_type)
        ],
        "experts": [
            [name, list(module.shape)] for name, module in model.named_modules() if isinstance(module, PackedExperts)
        ],
    }


def meta_model_with_shapes(
    directory: str,
    quantizer,
    select_targets: Callable[[nn.Module], None],
    about: dict,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The causal LM of `directory` without values (on the meta device), its layers as `about`, an `outline`, says.

    Parameters that stay as they are have the type that the reader gives them only once they are shared.
    """
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    eager = {"experts_implementation": "eager"} if quantizer.bits < 16 else {}
    with torch.device("meta"), _without_reports():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **eager)
    select_targets(model)
    for name in about["layers"]:
        module = model.get_submodule(name)
        if isinstance(module, Conv1D):
            module, bias = nn.Linear(module.nx, module.nf, device="meta"), module.bias
            module.bias = bias
        model.set_submodule(name, quantizer.empty_layer(module))
    for name, shape in about["experts"]:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        delattr(module, attribute)  # the parameter
        setattr(module, attribute, PackedExperts(name, torch.Size(shape), quantizer))
    model.name_or_path = directory
    model.config.dtype = config.dtype
    return model


def exact_dtype(directory: str, dtype: torch.dtype) -> torch.dtype:
    """In what tensors are read: float32, or `dtype` itself where the files hold nothing wider, which takes half the
    memory on the way.

    Codes must not depend on the precision, so a weight is never rounded before it is quantized.
    """
    kinds = {
        about["dtype"]
        for path in Path(directory).glob("*.safetensors")
        for name, about in check_safetensors(path).items()
        if name != "__metadata__"
    }
    return dtype if dtype == torch.bfloat16 and kinds <= {"BF16"} else torch.float32


def load_quantized(
    directory: str,
    quantizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    made_in: torch.dtype | None = None,
) -> nn.Module:
    """The causal LM of a checkpoint that bitsandbytes has already quantized as `quantizer` does: codes and scales as
    they are in the files, in modules as the quantizer makes them (transformers' own compute in the dtype that they were
    saved with).

    `made_in` is the dtype of what the model makes itself, its buffers, where that is another. Raises UsageError for
    files that are not this model's.
    """
    model = _from_pretrained(directory, trust_remote_code, dtype=made_in or dtype, device_map={"": device})
    for name, module in list(model.named_modules()):
        if isinstance(module, quantizer.module_type):
            layer = quantizer.empty_layer(module)
            layer.weight, layer.bias = module.weight, module.bias
            layer.quant_state = getattr(module, "quant_state", None)
            if layer.quant_state is not None:
                layer.quant_state.dtype = quantizer.compute_dtype  # the files have that of whoever wrote them
            model.set_submodule(name, layer)
    model.hf_quantizer.remove_quantization_config(model)
    give_dtype(model, dtype)
    owned_weights(model)
    return model


def give_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """What is not packed in `dtype`: transformers leaves a quantized checkpoint's other weights as they are in the
    files.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not float32_modules(model, name):
            parameter.data = parameter.data.to(dtype)


def load_packed(
    directory: str,
    quantizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    made_in: torch.dtype | None = None,
) -> nn.Module:
    """The causal LM of a directory whose linear weights are packed as the affine quantizer packs them: codes, scales
    and biases as they are in the files; `made_in` as for `read_quantized`. Raises UsageError for files that are not
    this model's, NotBuilt where more than linear layers is packed.
    """
    there = {
        name: about["dtype"]
        for path in Path(directory).glob("*.safetensors")
        for name, about in check_safetensors(path).items()
        if name != "__metadata__"
    }
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # mlx-lm's words, which transformers does not know
    stream = _PackedConfig(quantizer, there, dtype)
    model = _from_pretrained(
        directory,
        trust_remote_code,
        dtype=made_in or dtype,
        device_map={"": device},
        quantization_config=stream,
        config=config,
    )
    model.hf_quantizer.remove_quantization_config(model)
    for module in model.modules():
        if isinstance(
            module, quantizer.module_type
        ):  # codes, scale and bias are read as they are; no precision changes them
            scales, biases = module.scales.data, module.biases.data
            del module.scales, module.biases
            module.scales, module.biases = scales.clone(), biases.clone()
    give_dtype(model, dtype)
    owned_weights(model)
    return model


@register_quantization_config(f"{METHOD}_packed")
class _PackedConfig(QuantizationConfigMixin):
    """Carries the affine quantizer and {tensor: type} of the files through `from_pretrained`; it is never written to
    disk.
    """

    def __init__(self, quantizer=None, there: dict | None = None, dtype: torch.dtype = torch.float32, **ignored):
        self.quant_method, self.quantizer, self.there, self.dtype = f"{METHOD}_packed", quantizer, there, dtype

    def __deepcopy__(self, memo):
        return self


@register_quantizer(f"{METHOD}_packed")
class _Packed(HfQuantizer):
    """Puts the modules in place that the packed tensors belong to."""

    requires_calibration = False
    is_trainable = True

    def _process_model_before_weight_loading(self, model, **_):
        quantization = self.quantization_config
        packed = {name.removesuffix(".scales") for name in quantization.there if name.endswith(".scales")}
        layers = linears(model)
        others = sorted(packed - layers.keys())
        if others:
            raise NotSupported(
                f"{len(others)} parts of the checkpoint are packed that are no frozen linear layers here, {others[0]} "
                f"is the first",
                where=model.name_or_path,
                cure="python -m anyqlora quantize of the full-precision model: it packs linear layers only",
            )
        for name in packed:
            scales = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[
                quantization.there[f"{name}.scales"]
            ]
            model.set_submodule(name, quantization.quantizer.empty_layer(layers[name]).expect_files(scales))

    def update_dtype(self, dtype):
        return dtype

    def is_serializable(self) -> bool:
        return False


def _from_pretrained(directory: str, trust_remote_code: bool, **options) -> nn.Module:
    """The causal LM of `directory` as transformers reads it; what it would only report is refused, or said in a
    line.
    """
    _check_config(directory, trust_remote_code)
    with _without_reports():
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except ValueError as error:
            raise UsageError(
                f"transformers makes no causal language model of it: {str(error).strip().splitlines()[0]}",
                where=directory,
                cure="a causal language model (a decoder)",
            ) from None
    refuse_what_does_not_fit(loaded, directory)
    if loaded["unexpected_keys"]:
        strange = sorted(loaded["unexpected_keys"])
        print(
            printable(
                f"warning: {directory}: {len(strange)} tensors of the files are in no part of the model, {strange[0]} "
                f"is the first"
            ),
            file=sys.stderr,
        )
    return model


def _check_config(directory: str, trust_remote_code: bool) -> None:
    """Raises UsageError for a config.json that transformers does not understand."""
    try:
        AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (
        Exception
    ) as error:  # an unknown model_type, a value of a wrong type and code that is not to be run come as other kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        cure = "a model that this version of transformers knows, or a newer transformers"
        if not trust_remote_code and "trust_remote_code" in str(error):
            reason, cure = (
                "the model comes with Python code of its own, which is not run unasked",
                "read its *.py files, then --trust_remote_code true",
            )
        raise UsageError(f"not read by transformers: {reason}", where=f"{directory}/config.json", cure=cure) from None


@contextlib.contextmanager
def _without_reports():
    """transformers writes tables of what it makes up or leaves out; here the one is refused and the other said in a
    line.
    """
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def owned_weights(model: nn.Module) -> None:
    """Copy parameters in host memory: those that were not converted still lie in the files' pages, where a file that is
    written to would change them, and which no measurement of the process's memory would count.
    """
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
            if getattr(parameter, "CB", None) is not None:  # bitsandbytes' second name for an 8-bit weight
                parameter.CB = parameter.data
            state = getattr(parameter, "quant_state", None)
            for part in (state, state.state2) if state else ():
                if part is not None:
                    part.absmax, part.code = part.absmax.clone(), part.code.clone()


def refuse_what_does_not_fit(loaded: dict, directory: str) -> None:
    """Raises UsageError when the files lack a weight or have it in another shape: transformers would make one up and go
    on.
    """
    missing, others = sorted(loaded["missing_keys"]), sorted(loaded["mismatched_keys"])
    if others:
        name, there, here = others[0]
        raise UsageError(
            f"{len(others)} weights have another shape in the files than in the model, the first: {name} "
            f"{list(there)}, not {list(here)}",
            where=directory,
            cure="a config.json and weights that belong together",
        )
    if missing:
        raise UsageError(
            f"{len(missing)} weights are not in the files, {missing[0]} is the first",
            where=directory,
            cure="download the model again, or use a checkpoint of this very architecture",
        )
