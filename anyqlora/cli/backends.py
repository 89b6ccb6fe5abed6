"""python -m anyqlora backends [--markdown | --cells]: what each backend can do, what is tested, and what this machine
does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from anyqlora.core.errors import UsageError
from anyqlora.planning import cells as several
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.capabilities import CAPABILITIES, LOOPS, BackendUnavailable, Capabilities

USAGE = "python -m anyqlora backends [--markdown | --cells]"
COLUMNS = {
    "dtypes": "arithmetic",
    "quantizers": "frozen weights",
    "adapters": "what learns",
    "optimizers": "optimizers",
    "kernels": "kernels",
    "products": "products",
    "strategies": "strategies",
}
TESTED = "✓"
LEGEND = (
    f"{TESTED} = run by a test of this repository on that hardware. The rest follows from documentation and is "
    f"untested."
)


def cells(table: Mapping[str, Capabilities] = CAPABILITIES) -> Iterator[tuple[str, str, str, bool]]:
    """(backend, column, cell, tested) of everything that the table says: the list of what tests have to run."""
    for name, row in table.items():
        for column in COLUMNS:
            for cell in getattr(row, column):
                yield str(name), column, cell, cell in row.tested


def markdown(table: Mapping[str, Capabilities] = CAPABILITIES) -> str:
    """The support table as docs/backends.md shows it: the same on every machine."""
    lines = [
        "| backend | hardware | bits | " + " | ".join(COLUMNS.values()) + " | processes |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for name, row in table.items():
        shown = [
            ", ".join(f"{cell} {TESTED}" if cell in row.tested else cell for cell in getattr(row, column))
            for column in COLUMNS
        ]
        shown = [str(name), row.notes, ", ".join(map(str, row.bits)), *shown, row.collective or "one only"]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join([*lines, "", LEGEND])


def here(manager: BackendManager) -> Iterator[str]:
    """What this machine does of each backend, and why less."""
    for name in manager.names():
        report = manager.probe(name)
        if not report.available:
            yield f"{name:5} no: {report.why('available')}"
            continue
        row = manager.spec(name).capabilities
        why = LOOPS.get(row.framework)
        yield f"{name:5} yes: {', '.join(device.name for device in report.devices)}" + (f" ({why})" if why else "")
        for column, title in COLUMNS.items():
            if hasattr(report, column):
                yield f"      {title:14} {', '.join(getattr(report, column)) or 'none'}"
        yield from (f"      without {cell}: {why}" for cell, why in report.reasons.items())


def main(argv: list[str]) -> int:
    if argv in (["-h"], ["--help"]):
        print(f"usage: {USAGE}")
    elif argv == ["--markdown"]:
        print(markdown())
    elif argv == ["--cells"]:
        print(several.markdown())
    elif argv:
        raise UsageError(f"unexpected argument {argv[0]!r}", where="command line", cure=USAGE)
    else:
        try:
            manager = BackendManager()
        except BackendUnavailable as error:
            print(error)
            return error.exit_code
        print(*here(manager), sep="\n")
        print(f"\nauto takes {manager.backend}")
    return 0
