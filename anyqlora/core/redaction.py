"""Secrets out of what leaves this machine: tokens and keys by their shape, by the environment that holds them, and in
URLs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TypeVar, cast

T = TypeVar("T")

HIDDEN = "***"
SHORTEST = 6  # characters of an environment value that is taken for a secret: shorter ones stand in ordinary words
SECRET_NAMES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|api_org_[A-Za-z0-9]{10,}"  # Hugging Face
    r"|sk-(?=[\w-]*\d)[\w-]{12,}"  # OpenAI, Anthropic
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abprs]-[\w-]{10,}"  # Amazon, Google, Slack
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # a JSON web token
    r"|wandb_v\d+_\w{16,})"
)
OLD_WANDB_KEY = re.compile(
    r"(?<![0-9a-f])(?<!snapshots/)[0-9a-f]{40}(?![0-9a-f])"
)  # the hub's cache names commits like this
USER_OF_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
SECRET_OF_QUERY = re.compile(
    r"([?&;#](?:[^=&\s#]*(?:token|key|secret|passw|signature|credential|auth)[^=&\s#]*|sig)=)[^&\s#]+", re.IGNORECASE
)
COMMIT = "revision"  # the setting in which 40 hexadecimal digits are a commit


def redacted(value: T, environ: Mapping[str, str] | None = None) -> T:
    """`value` (text, or lists and dicts of it) without its secrets; tuples become lists."""
    environ = os.environ if environ is None else environ
    named = {
        text
        for name, text in environ.items()
        if len(text) >= SHORTEST and any(word in name.upper() for word in SECRET_NAMES)
    }
    return cast(T, _redacted(value, sorted(named, key=len, reverse=True)))


def _redacted(value: object, secrets: list[str], name: str = "") -> object:
    if isinstance(value, Mapping):
        return {key: _redacted(item, secrets, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, secrets, name) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = SECRET_OF_QUERY.sub(rf"\1{HIDDEN}", USER_OF_URL.sub(rf"\1{HIDDEN}@", value))
    value = SHAPES.sub(HIDDEN, value)
    return value if name == COMMIT else OLD_WANDB_KEY.sub(HIDDEN, value)
