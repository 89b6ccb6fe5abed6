"""What the processor has, and how ANYQLORA_CPU_FEATURES lowers it."""

import subprocess
import sys
from itertools import chain, combinations

import pytest

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import UsageError
from anyqlora.planning.machine import AMX, CPU_FEATURES, FEATURES_VARIABLE, cpu_features, cpu_flags, onednn_limit

ZEN_3 = {"avx2", "fma"}
ZEN_4 = {"avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni"}
SAPPHIRE_RAPIDS = {*ZEN_4, "amx_bf16", "amx_int8", "amx_tile"}
GRAVITON_3 = {"asimd", "bf16", "sve"}


def features(flags, stated=None):
    return set(cpu_features(flags, {} if stated is None else {FEATURES_VARIABLE: stated}))


@pytest.mark.parametrize(
    ("flags", "stated", "expected"),
    [
        (ZEN_4, None, {"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}),
        (ZEN_4, "", {"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}),
        (ZEN_4, "none", set()),
        (ZEN_4, "avx2", {"avx2"}),
        (ZEN_4, "avx512f", {"avx2", "avx512f"}),
        (ZEN_4, "avx512_bf16", {"avx2", "avx512f", "avx512_bf16"}),
        (ZEN_4, "avx512_bf16, avx512_vnni", {"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}),
        (ZEN_4, "amx_bf16 amx_int8", {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}),
        (ZEN_3, "amx_bf16,amx_int8", {"avx2"}),
        (SAPPHIRE_RAPIDS, None, {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"}),
        (SAPPHIRE_RAPIDS, "avx512_bf16,avx512_vnni", {"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}),
        (GRAVITON_3, None, {"asimd", "bf16"}),
        (GRAVITON_3, "asimd", {"asimd"}),
        (GRAVITON_3, "avx512_bf16", set()),
    ],
)
def test_the_variable_takes_instruction_sets_away(flags, stated, expected):
    assert features(flags, stated) == expected


@pytest.mark.parametrize(
    "flags",
    [ZEN_3, ZEN_4, SAPPHIRE_RAPIDS, GRAVITON_3, set()],
    ids=["Zen 3", "Zen 4", "Sapphire Rapids", "Graviton 3", "none"],
)
def test_nothing_that_it_names_adds_an_instruction_that_would_be_used(flags):
    """AMX alone may be named without being there, since only the framework uses it; and only where AVX512-BF16 and VNNI
    are.
    """
    for names in chain.from_iterable(combinations(CPU_FEATURES, count) for count in range(1, len(CPU_FEATURES) + 1)):
        added = features(flags, ",".join(names)) - flags
        assert added <= AMX and (not added or {"avx512_bf16", "avx512_vnni"} <= flags)


@pytest.mark.parametrize("stated", ["avx512", "avx2,avx999", "none,avx2"])
def test_a_name_that_is_none_is_refused_with_those_that_are(stated):
    with pytest.raises(UsageError, match="no such instruction set") as refused:
        features(ZEN_4, stated)
    assert refused.value.where == FEATURES_VARIABLE and "avx512_bf16" in refused.value.cure


def test_this_processor_is_what_the_system_says(monkeypatch):
    monkeypatch.delenv(FEATURES_VARIABLE, raising=False)
    assert set(cpu_features()) == CPU_FEATURES.keys() & cpu_flags()


def test_it_is_no_setting_of_a_run():
    assert resolve({}, environ={FEATURES_VARIABLE: "avx2"}) == resolve({}, environ={})


LARGEST_CODES = """
import torch
codes = torch.full((40, 256), 127, dtype=torch.int8)
print(bool((torch._int_mm(codes, codes[:32].T.contiguous()) == 127 * 127 * 256).all()))
"""


@pytest.mark.distributed  # programs of their own, since oneDNN reads its variables once
@pytest.mark.skipif("avx512_vnni" not in cpu_features(environ={}), reason="no AVX512-VNNI is here")
@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, "ONEDNN_MAX_CPU_ISA=avx2"),
        pytest.param(
            *({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "DNNL_MAX_CPU_ISA": "ALL"}, "ONEDNN_MAX_CPU_ISA=AVX512_CORE"),
            marks=pytest.mark.slow,
        ),
        ({"ONEDNN_MAX_CPU_ISA": "", "DNNL_MAX_CPU_ISA": "AVX2_VNNI"}, "DNNL_MAX_CPU_ISA=AVX2_VNNI"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "DNNL_MAX_CPU_ISA": "AVX2"}, ""),
        pytest.param({"ONEDNN_MAX_CPU_ISA": "no such name"}, "", marks=pytest.mark.slow),
        ({}, ""),
    ],
)
def test_sums_of_int8_overflow_exactly_where_onednn_is_limited(environ, limit, monkeypatch):
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    seen = subprocess.run([sys.executable, "-c", LARGEST_CODES], capture_output=True, text=True, check=True).stdout
    assert onednn_limit() == limit and seen.strip() == str(not limit)
