"""The axes of a device mesh by name, and which of them splits which dimension of a weight: read from flags and files,
no framework.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from anyqlora.config.schema import AUTO, TrainConfig
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.models.architectures import COLUMNS, ROWS, WHOLE, LinearShape, ModelShape

BATCH, MODEL = "batch", "model"
DEFAULT = "default"
SPLITS = {
    (MODEL, None): COLUMNS,
    (None, MODEL): ROWS,
    (None, None): WHOLE,
}  # axes of a weight [outputs, inputs] -> how it splits
EXAMPLE = r"model\.layers\.\d+\.mlp\.up_proj\.weight: [model, null]"


class LayoutError(UsageError, ValueError):
    """A mesh or a layout that cannot be used."""


class RegexMap(MutableMapping):
    """A map from names of tensors to values, whose keys are names or regexes of whole names.

    `layouts[name]` is the value of that very key, else of the one regex that matches the whole name, else None. Several
    regexes that match are an error: whichever won would be a guess.
    """

    def __init__(self, items=()):
        self._values: dict[str, object] = {}
        self.update(items)

    def key_of(self, name: str) -> str | None:
        """The key that speaks for `name`. Raises LayoutError when several do."""
        if name in self._values:
            return name
        keys = [key for key in self._values if re.fullmatch(key, name)]
        if len(keys) > 1:
            raise LayoutError(
                f"{name!r} matches several layout keys: {', '.join(map(repr, keys))}",
                cure="keys of which one matches each name; an exact name goes before any regex",
            )
        return keys[0] if keys else None

    def __getitem__(self, name: str) -> Any:
        key = self.key_of(name)
        return None if key is None else self._values[key]

    def __setitem__(self, key: str, value) -> None:
        if key in self._values:
            raise LayoutError(
                f"layout key {key!r} is there already, as {self._values[key]}", cure="take one of them out"
            )
        try:
            re.compile(key)
        except re.error as error:
            raise LayoutError(f"layout key {key!r} is not a regex: {error}") from None
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __contains__(self, name) -> bool:
        return self.key_of(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class LayoutRule:
    """How a layout file splits the weights that a key names, and where it says so."""

    split: str
    where: str


def mesh_axes(text: str, where: str = "") -> dict[str, int]:
    """{axis: processes along it} of `batch=2,model=2`. Raises LayoutError."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in (BATCH, MODEL):
            raise LayoutError(
                f"mesh {text!r}: unknown axis {name!r}",
                where=where,
                cure="batch=2,model=2: the axes are batch and model",
            )
        if name in axes or not size.isdecimal() or int(size) < 1:
            raise LayoutError(
                f"mesh {text!r}: {part.strip()!r} does not say how many processes are along {name}",
                where=where,
                cure="batch=2,model=2",
            )
        axes[name] = int(size)
    return axes


def format_rules(mesh: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def from_file(path: str) -> RegexMap:
    """{regex of parameter names: Said} of a YAML file of lines `regex: [axis of dimension 0, axis of dimension 1]`.

    Raises LayoutError naming file:line for what is not such a map.
    """
    import yaml

    def refuse(what: str, node=None) -> None:
        raise LayoutError(
            what, where=f"{path}:{node.start_mark.line + 1}" if node else path, cure=f"lines such as: {EXAMPLE}"
        )

    try:
        with open(path, encoding="utf-8-sig") as file:
            tree = yaml.compose(file.read(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"the layout cannot be read: {getattr(error, 'strerror', None) or error}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise LayoutError(
            f"not YAML: {getattr(error, 'problem', None) or error}",
            where=f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path,
            cure=f"lines such as: {EXAMPLE}",
        ) from None
    if not isinstance(tree, yaml.MappingNode) or not tree.value:
        refuse("no map of names to axes", tree)
    layout = RegexMap()
    for key, node in tree.value:
        listed = isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value)
        placement = tuple(None if item.tag.endswith(":null") else item.value for item in node.value) if listed else None
        if placement not in SPLITS:
            what = json.dumps(placement) if listed else repr(getattr(node, "value", "a map"))
            refuse(
                f"{key.value}: {what} is not one of [model, null] (split along outputs), [null, model] (along inputs), "
                f"[null, null]",
                key,
            )
        try:
            layout[key.value] = LayoutRule(SPLITS[placement], f"{path}:{key.start_mark.line + 1}")
        except LayoutError as error:
            refuse(error.message, key)
    return layout


# ------------------------------------------------------------------------------------------------------------ in a plan


def data_processes(config: TrainConfig) -> int:
    """How many groups of processes see different rows: those along the batch axis, all of them without a mesh. The same
    of settings as they were given as of what `resolve_mesh` makes of them.
    """
    if config.mesh:
        axes = mesh_axes(config.mesh, config.sources.get("mesh", ""))
        return axes.get(BATCH) or max(1, config.world_size // axes[MODEL])
    is_model_axis_alone = config.tensor_layout or config.strategy == "tp"
    return 1 if is_model_axis_alone else max(config.world_size, 1)


def resolve_mesh(draft, devices: int) -> None:
    """Resolve mesh, layout, strategy and world size, which say one thing together, where tensor parallelism is asked
    for.

    Without a mesh the model axis has all processes, of which there is one for each of `devices` unless somebody says.
    Raises LayoutError.
    """
    config = draft.config
    if not (config.mesh or config.tensor_layout or config.strategy == "tp"):
        return
    name = next(n for n in ("mesh", "tensor_layout", "strategy") if getattr(config, n))
    where = config.sources.get(name, "")
    if config.strategy not in (AUTO, "tp"):
        raise LayoutError(
            f"{name} is for strategy tp, and strategy is {config.strategy}",
            where=where,
            cure=f"--strategy tp, or leave out {name}",
        )
    mesh = (
        mesh_axes(config.mesh, where)
        if config.mesh
        else {MODEL: devices if config.world_size == -1 else config.world_size}
    )
    is_world_of_one = config.strategy == "tp" and config.world_size == 1 and not config.mesh  # asked for by name
    if mesh.get(MODEL, 1) < 2 and not is_world_of_one:
        raise LayoutError(
            "tensor parallelism needs a model axis of at least 2",
            where=where,
            cure="--mesh model=2; or --strategy fsdp for a batch axis alone",
        )
    world = config.world_size if config.world_size != -1 else math.prod(mesh.values())
    mesh = {BATCH: mesh.get(BATCH, world // mesh[MODEL]), MODEL: mesh[MODEL]}
    if math.prod(mesh.values()) != world:
        raise LayoutError(
            f"world_size {world} is not divisible into the mesh {format_rules(mesh)}",
            where=where,
            cure=f"--world_size {math.prod(mesh.values()) or mesh[MODEL]}, or another --mesh",
        )
    draft.choose("strategy", "tp")
    draft.choose("world_size", world)
    draft.choose("mesh", format_rules(mesh))
    draft.choose("tensor_layout", config.tensor_layout or DEFAULT)
    if draft.config.tensor_layout != DEFAULT:
        from_file(draft.config.tensor_layout)


def check(config: TrainConfig, shapes: ModelShape | None) -> None:
    """Raises UsageError or NotBuilt for what strategy tp cannot do, before anything is loaded.

    `shapes`: None where they are unknown.
    """
    if config.strategy != "tp":
        return

    def refuse(name: str, what: str, cure: str) -> None:
        raise NotSupported(
            f"{name} {getattr(config, name)} with strategy tp: {what}", where=config.sources.get(name, ""), cure=cure
        )

    if math.prod(mesh_axes(config.mesh).values()) != config.world_size:
        raise LayoutError(
            f"the mesh {config.mesh} and world_size {config.world_size} do not agree",
            where=config.sources.get("mesh", ""),
            cure="--mesh alone",
        )
    if config.precision == "fp16_autocast":
        refuse(
            "precision",
            "a gradient scaler cannot mix the gradients of split and whole tensors",
            "--precision bf16 or fp32",
        )
    if not registry.adapter(config.adapter).tensor_parallel:
        refuse(
            "adapter",
            "it needs whole weights where each process holds a slice",
            "--adapter lora or rslora, or --strategy fsdp",
        )
    if not registry.quantizer(config.quantizer).tensor_parallel:
        refuse("quantizer", "slices of weights that are kept so are not built", "--quantizer nf4, fp4 or none")
    if not registry.OPTIMIZERS[config.optimizer].shardable:
        refuse("optimizer", "bitsandbytes' optimizers do not update split tensors", "--optimizer adamw")
    if shapes is None:
        return
    if shapes.experts:
        raise NotSupported(
            f"strategy tp with a mixture of experts ({shapes.model_type}): the experts would stay whole on every "
            f"process",
            where=config.sources.get("strategy", ""),
            cure="--strategy fsdp",
        )
    if config.tensor_layout == DEFAULT:
        ways = mesh_axes(config.mesh)[MODEL]
        for linear in shapes.linears:
            check_split(linear, linear.split, ways, config, config.sources.get("mesh", ""))
        if has_split_heads(shapes):
            check_heads(shapes.heads, shapes.kv_heads, ways, config.sources.get("mesh", ""))


def slice_of(shapes: ModelShape | None, config: TrainConfig) -> ModelShape | None:
    """The shapes of what each process computes with, from which its memory is predicted; by a layout file they are
    taken as whole.
    """
    if shapes is None or config.strategy != "tp" or config.tensor_layout != DEFAULT:
        return shapes
    ways = mesh_axes(config.mesh)[MODEL]
    linears = tuple(
        replace(
            linear,
            outputs=linear.outputs // (ways if linear.split == COLUMNS else 1),
            inputs=linear.inputs // (ways if linear.split == ROWS else 1),
        )
        for linear in shapes.linears
    )
    heads = ways if has_split_heads(shapes) else 1
    return replace(
        shapes,
        linears=linears,
        heads=shapes.heads // heads,
        kv_heads=shapes.kv_heads // heads,
        intermediate=shapes.intermediate // ways,
    )


def has_split_heads(shapes: ModelShape) -> bool:
    """Whether each process has some of the heads: not where all are normalized together, or cut out of one fused
    output.
    """
    return shapes.qk_norm != "all" and not (shapes.fused_qkv and shapes.gated)


def check_split(linear: LinearShape, split: str, ways: int, config: TrainConfig, where: str) -> None:
    """Raises LayoutError when `linear` cannot be split so into `ways` slices that quantize as the whole does."""
    cure = "another --mesh, or a --tensor_layout FILE that keeps it whole"
    if split == COLUMNS and linear.outputs % ways:
        raise LayoutError(
            f"{linear.name} has {linear.outputs} outputs, which {ways} processes cannot share evenly",
            where=where,
            cure=cure,
        )
    if split == ROWS and linear.inputs % ways:
        raise LayoutError(
            f"{linear.name} has {linear.inputs} inputs, which {ways} processes cannot share evenly",
            where=where,
            cure=cure,
        )
    rows = linear.inputs // ways if split == ROWS else linear.inputs
    block = registry.quantizer(config.quantizer).block
    if split != WHOLE and block and rows % block:
        of = f"{linear.inputs} / {ways} = {rows} inputs per process" if split == ROWS else f"{rows} inputs"
        raise LayoutError(
            f"{linear.name}: {of} are no multiple of {block}, the weights that share a {config.quantizer} scale",
            where=where,
            cure=cure,
        )


def check_heads(heads: int, kv_heads: int, ways: int, where: str) -> None:
    """Raises LayoutError when attention heads would be cut in two."""
    if heads % ways or kv_heads % ways:
        raise LayoutError(
            f"{heads} heads and {kv_heads} key heads cannot be shared evenly by {ways} processes",
            where=where,
            cure="another --mesh, or a --tensor_layout FILE that keeps attention whole",
        )
