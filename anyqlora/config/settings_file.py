"""What one place states, before it is merged with what others do; and what a YAML file states: settings, those of
Accelerate's file, or a DeepSpeed configuration.
"""

from __future__ import annotations

from pathlib import Path

from anyqlora.config import deepspeed_file, other_tools
from anyqlora.config.facets import AUTO
from anyqlora.config.schema import ALIASES, SETTINGS, canonical_settings, parse_value
from anyqlora.core.errors import UsageError


class Layer(dict):
    """{setting: (value, where it is stated)}."""

    def __init__(self, *stated, **named):
        super().__init__(*stated, **named)
        self._theirs: set[str] = set()  # settings that a name of another tool says

    def state(self, setting: str, value: object, where: str, name: str) -> None:
        """Take a value that is stated as `name`.

        Options of a strategy join others'. What is stated twice is refused, unless another tool's name says the same
        again. Raises UsageError.
        """
        plain = name.replace("-", "_")
        is_theirs = plain not in SETTINGS and plain not in ALIASES and other_tools.find(plain) is not None
        if setting in self:
            first, place = self[setting]
            if setting == "strategy_opt":
                self[setting] = (f"{first},{value}", f"{place}, {where}")
                return
            can_agree = is_theirs or setting in self._theirs
            if not can_agree or parse_value(setting, first, place) != parse_value(setting, value, where):
                raise UsageError(
                    f"{setting} is stated twice; first at {place}", where=where, cure="take one of them out"
                )
            return
        if is_theirs:
            self._theirs.add(setting)
        self[setting] = (value, where)


def from_file(path: str | Path, notes: list[str] | None = None) -> dict[str, tuple[object, str]]:
    """{setting: (value, "file:line")} of a YAML file: a map of settings, Accelerate's, or a DeepSpeed configuration.

    What another tool's file says and changes nothing here goes to `notes`. Raises UsageError for what is no such file.
    """
    import yaml  # which commands without a file do without

    tree = _map_of_settings(path)
    if tree is None:
        return {}
    keys = {str(key.value): isinstance(node, yaml.MappingNode) for key, node in tree.value}
    if deepspeed_file.is_deepspeeds(keys):
        return {"strategy_config": (str(path), f"{path}:1")}
    settings = Layer()
    _read_map(path, tree, "", settings, [] if notes is None else notes, is_theirs=other_tools.is_accelerates(keys))
    return settings


def _map_of_settings(path: str | Path):
    """The file's map, as PyYAML's node; None where the file is empty. Raises UsageError for what is no map."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = Path(path).read_bytes()[: error.start].count(b"\n") + 1
        raise UsageError(f"not UTF-8: {error.reason}", where=f"{path}:{line}", cure="save it as UTF-8") from None
    except OSError as error:
        raise UsageError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            cure="a YAML file of settings, such as those in configs/",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise UsageError(
            f"not YAML: {getattr(error, 'problem', None) or error}",
            where=where,
            cure="write one `name: value` per line",
        ) from None
    if tree is not None and (not isinstance(tree, yaml.MappingNode) or tree.tag != "tag:yaml.org,2002:map"):
        raise UsageError("not a map of settings", where=f"{path}:1", cure="write one `name: value` per line")
    return tree


def _read_map(path, tree, prefix: str, settings: Layer, notes: list[str], *, is_theirs: bool) -> None:
    """Put what a map states into `settings`. `prefix`: what its names begin with, where they leave it out;
    `is_theirs`: it is Accelerate's, in which a name without a value, or with the value auto, states nothing.

    Raises UsageError naming the line.
    """
    import yaml

    for key, node in tree.value:
        where, name = f"{path}:{key.start_mark.line + 1}", str(key.value)
        if isinstance(node, yaml.MappingNode) and name in other_tools.SECTIONS:
            _read_map(path, node, other_tools.SECTIONS[name], settings, notes, is_theirs=True)
            continue
        if not name.startswith(prefix) and (_is_known(prefix + name) or not _is_known(name)):
            name = prefix + name
        value = _plain_value(name, node, where)
        if is_theirs and (value == AUTO or (value in (None, []) and name not in SETTINGS)):
            continue
        for setting, stated in canonical_settings(name, value, where, notes).items():
            if SETTINGS[setting].metadata["cli_only"]:
                raise UsageError(
                    f"{setting} can only be given on the command line",
                    where=where,
                    cure=f"take the line out; --{setting} {value}",
                )
            settings.state(setting, stated, where, name)


def _is_known(name: str) -> bool:
    return name in SETTINGS or name in ALIASES or other_tools.find(name) is not None


def _plain_value(name: str, node, where: str) -> object:
    """The text, or the texts, of a value; None where there is none. Raises UsageError for a map, and for tags."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        if not _is_known(name):
            canonical_settings(name, None, where)  # which says that it is unknown
        setting = SETTINGS.get(ALIASES.get(name, name))
        about = setting.metadata["help"] if setting else "one value"
        raise UsageError(f"{name} is not a map", where=where, cure=f"{name} is: {about}")
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    standard = all(part.tag.startswith("tag:yaml.org,2002:") and "python" not in part.tag for part in [node, *items])
    if not standard or not all(isinstance(item, yaml.ScalarNode) for item in items):
        raise UsageError(
            f"{name}: plain values only",
            where=where,
            cure="a number, a text, true or false, or a list of them, without tags",
        )
    values = [None if item.tag.endswith(":null") else item.value for item in items]
    return values if isinstance(node, yaml.SequenceNode) else values[0]
