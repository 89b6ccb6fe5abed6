"""Whose line an error comes from: what another package's code raises is named by that code's file and line."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping

from anyqlora.core.errors import RunError


def place(error: BaseException, target: str) -> str:
    """`file:line` by which an error left the package of `target` ("module", "module:Object"); "" where it never was in
    it.
    """
    package = target.partition(":")[0].partition(".")[0]
    return next((at for name, at in _frames(error) if name.partition(".")[0] == package), "")


def reason(error: BaseException, target: str) -> str:
    """What went wrong, in a line; and what raised, where that is not the line of the package of `target` itself."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    raised = next((at for _, at in _frames(error)), "")
    is_elsewhere = place(error, target) not in ("", raised)
    return f"{message}, raised at {raised}" if is_elsewhere else message


def described(error: BaseException, target: str) -> str:
    """What went wrong while the package of `target` was imported or asked, and in which line of it."""
    at = place(error, target)
    if not at and isinstance(error, SyntaxError) and error.filename and error.lineno:  # nothing of it has run
        at = f"{error.filename}:{error.lineno}"
    return f"{reason(error, target)} ({at})" if at else reason(error, target)


def _frames(error: BaseException) -> list[tuple[str, str]]:
    """(module, "file:line") of an error's frames, the innermost first; without what importing and dataclasses make."""
    frames = [
        (str(frame.f_globals.get("__name__", "")), f"{frame.f_code.co_filename}:{line}")
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")
    ]
    return frames[::-1]


def _raised_by(error: BaseException, target: str) -> str:
    """`file:line` of the `raise` where it stands in the package of `target`; else ""."""
    raised = next((at for _, at in _frames(error)), "")
    return raised if raised == place(error, target) else ""


def place_of_class(cls: type) -> str:
    """`file:line` of a class, or its name where it has no source."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


@contextlib.contextmanager
def named_plugin_errors(plugins: Mapping[tuple[str, str], str]) -> Iterator[None]:
    """An error that comes out of another package's code is a RunError that names its line; ours stay what they are.

    plugins: {(kind, name): "module:Object"} of what such packages bring to the run.
    """
    try:
        yield
    except RunError as error:
        error.where = error.where or next((at for target in plugins.values() if (at := _raised_by(error, target))), "")
        raise
    except Exception as error:
        for (kind, name), target in plugins.items():
            if at := place(error, target):
                cure = "mend it there, or run without it"
                raise RunError(f"{kind} {name!r} raises {reason(error, target)}", where=at, cure=cure) from error
        raise
