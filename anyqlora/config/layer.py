"""What one place states - flags, code, the environment, a file - before it is merged with what others do."""

from __future__ import annotations

from anyqlora.config import other_tools
from anyqlora.config.schema import ALIASES, SETTINGS, parse_value
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
