"""LLaMA-Factory's dataset_info.json: sets by name, where they lie and what they call their columns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from anyqlora.core.errors import UsageError

NAME = "dataset_info.json"
_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_TEXT = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
_BESIDE = {"system": "system", "tools": "tools", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label"}
_SEEN = ("images", "videos", "audios")
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {"user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation", "system_tag": "system"}


@dataclass(frozen=True)
class IndexedSet:
    """One set of an index."""

    index: Path
    name: str
    entry: dict = field(hash=False)

    @property
    def place(self) -> str:
        """The file, directory or hub id that its rows are read from. Raises UsageError where it has none of these."""
        entry = self.entry
        if name := entry.get("file_name"):
            return str(self.index.parent / name)
        if name := entry.get("hf_hub_url"):
            config, split = entry.get("subset"), entry.get("split")
            return name + f":{config}" * bool(config) + f"[{split}]" * bool(split and split != "train")
        raise UsageError(
            f"{self.name!r} names no file_name and no hf_hub_url", where=str(self.index), cure="one of the two"
        )

    def row(self, row: dict) -> dict:
        """The row under the names that our formats have."""
        entry, columns = self.entry, self.entry.get("columns") or {}
        is_talk = entry.get("formatting", "alpaca") == "sharegpt"
        if is_talk:
            theirs = {"messages": "conversations", **columns}
            named = {theirs["messages"]: "conversations"}
        else:
            defaults = {} if columns else {"prompt": "instruction", "query": "input", "response": "output"}
            theirs = {**defaults, **columns}
            is_raw = set(theirs) & {*_TEXT} == {"prompt"} and not entry.get("ranking")
            named = {theirs[key]: "text" if is_raw else ours for key, ours in _TEXT.items() if theirs.get(key)}
        named |= {theirs[key]: ours for key, ours in _BESIDE.items() if theirs.get(key)}
        named |= {theirs[key]: key for key in _SEEN if theirs.get(key)}
        made = {named.get(key, key): value for key, value in row.items()}
        if is_talk and isinstance(made.get("conversations"), list):
            made["conversations"] = [self._turn(turn) for turn in made["conversations"]]
        return made

    def _turn(self, turn: object) -> object:
        tags = {**_TAGS, **(self.entry.get("tags") or {})}
        if not isinstance(turn, dict) or tags["role_tag"] not in turn:
            return turn
        role = turn[tags["role_tag"]]
        roles = {tags[tag]: ours for tag, ours in _ROLES.items()} | {tags["function_tag"]: "function_call"}
        rest = {key: value for key, value in turn.items() if key not in (tags["role_tag"], tags["content_tag"])}
        return {**rest, "from": roles.get(role, role), "value": turn.get(tags["content_tag"])}


def read(path: Path) -> dict[str, IndexedSet]:
    """The sets of an index; {} for a file of this name that is something else (Hugging Face's have it, too)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    sets = {name: entry for name, entry in content.items() if isinstance(entry, dict) and {*_PLACES} & entry.keys()}
    return {name: IndexedSet(path, name, entry) for name, entry in sets.items()}
