"""What installed packages register for this one, as entry points of the groups `anyqlora.*`."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import entry_points
from typing import Any

from anyqlora.core.descriptors import load
from anyqlora.core.errors import UsageError
from anyqlora.core.plugin_errors import described

GROUPS = ("backends", "strategies", "quantizers", "adapters")


def entry_point_targets(group: str) -> dict[str, str]:
    """{name: "module:Object"} of the installed entry points of `anyqlora.<group>`; nothing is imported."""
    return {name: target for name, target, _ in entry_points_of(group)}


def entry_points_of(group: str) -> tuple[tuple[str, str, str], ...]:
    """(name, "module:Object", package) of every installed entry point of `anyqlora.<group>`, in the order of names."""
    return _installed(tuple(sys.path))[group]


@functools.cache
def _installed(_path: tuple[str, ...]) -> dict[str, tuple[tuple[str, str, str], ...]]:
    """One look reads the metadata of all packages there are, which takes 10 ms."""
    points = entry_points()
    return {
        group: tuple(
            sorted(
                (point.name, point.value, point.dist.name if point.dist else "?")
                for point in points.select(group=f"anyqlora.{group}")
            )
        )
        for group in GROUPS
    }


def another_packages(kind: str, name: str, group: str, is_built_in: bool, where: str = "") -> str:
    """The "module:Object" of a name that is not ours: it is one itself, or a package registers it; "" where neither is.

    Raises UsageError where two register it, or one does that is `is_built_in`.
    """
    if ":" in name:
        return name
    packages = [(target, package) for known, target, package in entry_points_of(group) if known == name]
    owners = ["anyqlora"] * is_built_in + [package for _, package in packages]
    if len(owners) > 1:
        raise UsageError(
            f"{kind} {name!r} is registered by {' and by '.join(owners)}",
            where=where,
            cure=f"uninstall one of them, or give it as --{kind} module:Object",
        )
    return packages[0][0] if packages else ""


def imported(kind: str, name: str, target: str, where: str = "") -> Any:
    """Another package's object. Raises UsageError where it cannot be imported, saying why and in which line."""
    try:
        return load(target)
    except (Exception, SystemExit) as error:  # somebody else's code: whatever is wrong with it is the finding
        raise UsageError(
            f"{kind} {name!r} cannot be imported: {described(error, target)}",
            where=where or target,
            cure=f"--{kind} module:Object, importable from here",
        ) from error
