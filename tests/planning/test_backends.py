"""Backends: the same probes on this machine and on machines that are described in tests/machines, and the table's cells
run.
"""

import importlib
import json
import mmap
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace

import bitsandbytes
import pytest
import torch

from anyqlora.__main__ import main as anyqlora
from anyqlora.cli import backends
from anyqlora.config.resolve import resolve
from anyqlora.core import registry
from anyqlora.core.errors import NotSupported, UsageError
from anyqlora.planning import machine as machines
from anyqlora.planning.backends import BackendManager, detect_backend, get_backend_manager, get_device
from anyqlora.planning.capabilities import CAPABILITIES, LOOPS, Backend, BackendUnavailable
from anyqlora.planning.machine import Device, Machine, native_library, observe, quantizes
from tests.support import paths, runs
from tests.support.paths import PACKAGES, ROOT

MACHINES = {
    path.stem: Machine.from_dict(json.loads(path.read_text())["machine"])
    for path in sorted(paths.MACHINES.glob("*.json"))
}
THIS = observe()

# machine -> what is available, what auto takes, its device, dtypes (best first), quantizers, collective
EXPECTED = {
    "t4": (["cuda", "cpu"], "cuda", "cuda:0", ("fp16", "fp32"), ("nf4", "fp4", "int8", "affine4", "none"), "nccl"),
    "a100": (
        ["cuda", "cpu"],
        "cuda",
        "cuda:0",
        ("bf16", "fp16", "fp32"),
        ("nf4", "fp4", "int8", "affine4", "none"),
        "nccl",
    ),
    "h200": (
        ["cuda", "cpu"],
        "cuda",
        "cuda:0",
        ("bf16", "fp16", "fp32"),
        ("nf4", "fp4", "int8", "affine4", "none"),
        "nccl",
    ),
    "rx7900": (
        ["rocm", "cpu"],
        "rocm",
        "cuda:0",
        ("bf16", "fp16", "fp32"),
        ("nf4", "fp4", "int8", "affine4", "none"),
        "nccl",
    ),
    "arc": (
        ["xpu", "cpu"],
        "xpu",
        "xpu:0",
        ("bf16", "fp16", "fp32"),
        ("nf4", "fp4", "int8", "affine4", "none"),
        "xccl",
    ),
    "m1_macos13": (["cpu"], "cpu", "cpu", ("fp32", "bf16", "fp16"), ("affine4", "none"), "gloo"),
    "m3": (["mlx", "mps", "cpu"], "mlx", "gpu", ("bf16", "fp16", "fp32"), CAPABILITIES[Backend.MLX].quantizers, "ring"),
    "linux_mlx": (
        ["mlx", "cpu"],
        "cpu",
        "cpu",
        ("fp32", "bf16", "fp16"),
        ("nf4", "fp4", "int8", "affine4", "none"),
        "gloo",
    ),
    "nothing": (["cpu"], "cpu", "cpu", ("fp32", "bf16", "fp16"), ("affine4", "none"), "gloo"),
}


def without(machine, **changes):
    return replace(machine, **changes)


def test_every_described_machine_is_expected():
    assert set(MACHINES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_described_machine(name):
    available, auto, device, dtypes, quantizers, collective = EXPECTED[name]
    manager = BackendManager(machine=MACHINES[name])
    assert manager.available() == available
    assert (manager.backend, manager.device) == (auto, device)
    assert manager.report.dtypes == dtypes
    assert manager.report.quantizers == quantizers
    assert manager.get_distributed_backend() == collective
    for backend in Backend:  # what is not available says why
        found = manager.probe(backend)
        assert found.available or found.why("available")


@pytest.mark.parametrize("name", EXPECTED)
def test_machine_survives_json(name):
    assert Machine.from_dict(json.loads(json.dumps(MACHINES[name].to_dict()))) == MACHINES[name]


def test_this_machine_survives_json():
    assert Machine.from_dict(json.loads(json.dumps(THIS.to_dict()))) == THIS


@pytest.mark.parametrize(
    ("machine", "backend", "cell", "reason"),
    [
        ("t4", "cuda", "bf16", "Tesla T4 (7.5) has no bf16 in hardware"),
        ("nothing", "cpu", "nf4", "bitsandbytes is not installed"),
        ("nothing", "cpu", "adamw_8bit", "bitsandbytes is not installed"),
        ("m1_macos13", "mps", "available", "13.6.9"),
        ("a100", "rocm", "available", "not built for AMD"),
        ("linux_mlx", "xpu", "available", "not built for Intel"),
        ("m3", "cuda", "available", "not built for NVIDIA"),
    ],
)
def test_reasons(machine, backend, cell, reason):
    assert reason in BackendManager(machine=MACHINES[machine]).probe(backend).why(cell)


def test_broken_driver_library_and_metal_have_reasons():
    t4, m3 = MACHINES["t4"], MACHINES["m3"]
    no_driver = without(t4, cuda=(), torch={**t4.torch, "cuda_error": "the NVIDIA driver is too old"})
    assert BackendManager(machine=no_driver).probe("cuda").why("available") == "the NVIDIA driver is too old"
    no_library = without(t4, bitsandbytes={"version": "0.50.2", "error": "libcudart.so.13: cannot open"})
    found = BackendManager(machine=no_library).report
    assert found.quantizers == ("affine4", "none")
    assert "libcudart" in found.why("nf4")
    assert "paged_adamw" not in found.optimizers
    assert "adamw" in found.optimizers
    wrong = without(m3, mps={**m3.mps, "quantizes": False, "bf16": False})
    found = BackendManager("mps", machine=wrong).report
    assert found.dtypes == ("fp16", "fp32")
    assert found.quantizers == ("affine4", "none")
    dead = without(m3, mps={"built": True, "available": True, "allocates": False, "error": "Metal is out of reach"})
    assert BackendManager(machine=without(dead, mlx={"error": "mlx is not installed"})).backend == "cpu"
    no_nccl = without(t4, torch={**t4.torch, "collectives": ["gloo"]})
    assert BackendManager(machine=no_nccl).get_distributed_backend() == "gloo"
    with pytest.raises(BackendUnavailable, match="torch is not installed"):
        BackendManager(machine=without(t4, torch={"error": "torch is not installed"}, cuda=()))


MIXED = (
    Device("NVIDIA GeForce RTX 4090", "8.9", 24 << 30, 23 << 30, True),
    Device("NVIDIA GeForce RTX 3060", "8.6", 12 << 30, 11 << 30, True),
    Device("Tesla T4", "7.5", 16 << 30, None, False),
)


@pytest.mark.parametrize(
    ("count", "settings", "free", "precision"),
    [
        (2, {}, 11 << 30, "bf16"),
        (2, {"world_size": 1}, 23 << 30, "bf16"),
        (3, {}, 11 << 30, "fp16_autocast"),
        (3, {"strategy": "single"}, 23 << 30, "bf16"),
        (3, {"world_size": 2}, 11 << 30, "bf16"),
    ],
)
def test_a_run_is_planned_for_the_least_of_its_devices(count, settings, free, precision):
    plan = BackendManager(machine=without(MACHINES["a100"], cuda=MIXED[:count])).plan(
        resolve({"model_name": "demo", "dataset": "demo", **settings}, environ={})
    )
    assert (plan.memory_free, plan.precision) == (free, precision)


def test_a_device_that_was_not_measured_counts_as_empty_beside_one_that_was():
    full = BackendManager(
        machine=without(MACHINES["a100"], cuda=(MIXED[0], replace(MIXED[1], memory_free=None)))
    ).report
    assert (full.memory_free, full.used(1).memory_free, full.used(2).memory_total) == (12 << 30, 23 << 30, 12 << 30)
    assert (
        BackendManager(
            machine=without(MACHINES["a100"], cuda=(replace(MIXED[0], memory_free=None),))
        ).report.memory_free
        is None
    )


DRIVER = """
asked = []
device_count = lambda: 3
memory_reserved = lambda index: 70 if index == 0 else 0
memory_allocated = lambda index: 20 if index == 0 else 0
def mem_get_info(index):
    asked.append(index)
    if index == 1:
        raise RuntimeError("this driver does not tell")
    return 1000 + index, 4000
"""


@pytest.mark.parametrize(
    ("environ", "count", "free", "asked"),
    [
        ({}, 1, [1050], [0]),
        ({"LOCAL_RANK": "2"}, 3, [None, None, 1002], [2]),
        ({"LOCAL_RANK": "1"}, 3, [None] * 3, [1]),
        ({"LOCAL_RANK": "0"}, 3, [1050, None, 1002], []),
        ({}, 3, [1050, None, 1002], []),
        ({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "2", "SLURM_STEP_NUM_TASKS": "4"}, 1, [1050], [0]),
        ({"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}, 3, [1050, None, 1002], []),
    ],
)
def test_a_process_asks_only_the_device_that_it_will_use_and_has_others_asked_elsewhere(
    environ, count, free, asked, tmp_path, monkeypatch
):
    """The driver is a file that notes who asks. What this process keeps of an earlier run is free, too."""
    (tmp_path / "driver.py").write_text(DRIVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.delitem(sys.modules, "driver", raising=False)
    driver = importlib.import_module("driver")
    assert machines.free_memory(driver, count, environ) == free and driver.asked == asked


def test_a_driver_that_cannot_be_asked_leaves_the_memory_unknown():
    assert machines.asked_elsewhere("no_such_driver", 2) == [None, None]


def test_cpu_prefers_bf16_only_in_hardware():
    fast = without(MACHINES["nothing"], cpu_features=("avx512_bf16",))
    assert BackendManager(machine=fast).get_dtype() == torch.bfloat16
    assert BackendManager(machine=fast).get_dtype(prefer_bfloat16=False) == torch.float32
    assert BackendManager(machine=MACHINES["nothing"]).get_dtype() == torch.float32
    assert BackendManager(machine=MACHINES["t4"]).get_dtype() == torch.float16
    assert BackendManager(machine=MACHINES["a100"]).get_dtype() == torch.bfloat16
    assert BackendManager(machine=MACHINES["a100"]).get_dtype(prefer_bfloat16=False) == torch.float16


def test_kernels_in_c_want_a_compiler_and_a_processor_for_them():
    can = without(MACHINES["nothing"], system="Linux", compiler="/usr/bin/cc", cpu_features=("avx512_bf16",))
    assert BackendManager("cpu", machine=can).report.kernels == ("native", "portable")
    for lacking, why in (
        ({"compiler": ""}, "no C compiler is here"),
        ({"cpu_features": ("avx2", "bf16")}, "this processor has no AVX512-BF16"),
    ):
        found = BackendManager("cpu", machine=without(can, **lacking)).report
        assert found.kernels == ("portable",) and found.why("native") == why


def test_products_in_8_bits_want_a_processor_for_them():
    """Without VNNI int8's products are summed in 16 bits, which overflow; before compute capability 8.9 there is no
    float8.
    """
    nothing = MACHINES["nothing"]
    rounded = ("full", "int8_backward", "int8")
    for features, products in ((("avx2",), ("full",)), (("avx512_vnni",), rounded), (("amx_int8",), rounded)):
        assert BackendManager("cpu", machine=without(nothing, cpu_features=features)).report.products == products
    for kind in rounded[1:]:
        assert "AVX512-VNNI" in BackendManager("cpu", machine=without(nothing, cpu_features=())).report.why(
            f"{kind} products"
        )
    limited = without(nothing, cpu_features=("avx512_vnni",), onednn_limit="ONEDNN_MAX_CPU_ISA=AVX2")
    report = BackendManager("cpu", machine=limited).report
    assert report.products == ("full",) and "ONEDNN_MAX_CPU_ISA=AVX2" in report.why("int8 products")
    for machine, products in (("h200", ("full", "fp8")), ("a100", ("full",)), ("t4", ("full",))):
        assert BackendManager("cuda", machine=MACHINES[machine]).report.products == products
    assert "(8.0) does not multiply float8" in BackendManager("cuda", machine=MACHINES["a100"]).report.why(
        "fp8 products"
    )


def test_unavailable_backend_is_a_value_error_with_reasons():
    with pytest.raises(
        ValueError, match=r"^Backend 'cuda' is not available on this system\. Available: cpu\n"
    ) as caught:
        BackendManager("cuda", machine=MACHINES["nothing"])
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_code == 2
    for backend in ("cuda", "rocm", "xpu", "mlx", "mps"):
        assert f"\n  {backend}: " in str(caught.value)


def test_unknown_backend_lists_the_known():
    with pytest.raises(ValueError, match="did you mean 'cuda'.*\n.*auto, cuda, rocm, xpu, mlx, mps, cpu"):
        BackendManager("cudaa")


@pytest.mark.parametrize("asked", ["CUDA", "Cuda", "cuda", Backend.CUDA])
def test_backends_are_named_in_any_case(asked):
    assert BackendManager(asked, machine=MACHINES["a100"]).backend is Backend.CUDA
    config = resolve({"model_name": "demo", "dataset": "demo", "backend": str(asked)}, environ={})
    assert BackendManager(config.backend, machine=MACHINES["a100"]).plan(config).backend == "cuda"
    assert BackendManager("AUTO", machine=MACHINES["a100"]).backend is Backend.CUDA


@pytest.mark.parametrize("variable", ["FSDP_BACKEND", "ANYQLORA_BACKEND"])
@pytest.mark.parametrize("asked, why", [("CUDA", "Backend 'cuda' is not available"), ("cudda", "unknown backend")])
def test_a_refusal_names_the_variable_that_asked_and_how_to_take_it_back(variable, asked, why, monkeypatch, capsys):
    for other in ("FSDP_BACKEND", "ANYQLORA_BACKEND"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, asked)
    with pytest.raises(BackendUnavailable, match=f"^{variable}: {why}") as refused:
        BackendManager.from_env()
    assert f"unset {variable}" in refused.value.cure
    assert anyqlora(["plan", "--model_name", "demo", "--dataset", "demo"]) == 2
    said = capsys.readouterr().err
    assert f"{variable}: {why}" in said and f"unset {variable}" in said
    assert anyqlora(["plan", "--model_name", "demo", "--dataset", "demo", "--backend", "Cpu"]) == 0
    with pytest.raises(BackendUnavailable) as refused:
        BackendManager(asked, where="command line: --backend", machine=MACHINES["nothing"])
    assert "unset" not in refused.value.cure and refused.value.where == "command line: --backend"


def test_backend_without_a_loop_is_refused_and_passed_over():
    table = {**CAPABILITIES, Backend.MLX: replace(CAPABILITIES[Backend.MLX], framework="jax")}
    with pytest.raises(NotSupported, match="no loop runs framework 'jax'"):
        BackendManager("mlx", machine=MACHINES["m3"], table=table)
    passed_over = BackendManager(machine=MACHINES["m3"], table=table)
    assert "mlx" in passed_over.available() and passed_over.backend == "mps"
    table = {**CAPABILITIES, Backend.CPU: replace(CAPABILITIES[Backend.CPU], framework="jax")}
    with pytest.raises(NotSupported, match="no loop runs framework 'jax'"):
        BackendManager("cpu", machine=MACHINES["nothing"], table=table)
    with pytest.raises(BackendUnavailable):
        BackendManager(machine=MACHINES["nothing"], table=table)


@pytest.mark.parametrize(
    ("mlx", "said"),
    [
        ({"error": "mlx is not installed"}, "not installed"),
        ({"version": "0.32.4", "build": "", "lm_version": "0.32.2"}, "device code"),
        ({"version": "0.32.4", "build": "mlx-metal", "lm_version": ""}, "without mlx-lm"),
    ],
)
def test_half_of_mlx_is_none(mlx, said):
    manager = BackendManager(machine=without(MACHINES["m3"], mlx=mlx))
    assert manager.backend == "mps" and said in manager.probe("mlx").why("available")
    with pytest.raises(BackendUnavailable, match=said):
        BackendManager("mlx", machine=without(MACHINES["m3"], mlx=mlx))


def test_mlx_plans_with_what_metal_keeps_resident():
    """Of 36 GiB, Metal recommends 27; a torch without MPS does not say, and two thirds are the least that it may be."""
    m3 = MACHINES["m3"]
    for mps, total in ((m3.mps, 27 << 30), ({"built": False, "available": False}, 24 << 30)):
        idle = BackendManager("mlx", machine=without(m3, mps=mps, memory_available=33 << 30)).report
        assert (idle.memory_total, idle.memory_free) == (total, total)
        assert (
            BackendManager("mlx", machine=without(m3, mps=mps, memory_available=5 << 30)).report.memory_free == 5 << 30
        )


def test_a_mac_without_a_gpu_has_no_mlx():
    headless = without(MACHINES["m3"], mps={"built": True, "available": False})
    assert BackendManager(machine=headless).backend == "cpu"
    with pytest.raises(BackendUnavailable, match="Metal finds no GPU"):
        BackendManager("mlx", machine=headless)


def test_mlx_without_metal_runs_when_it_is_named():
    manager = BackendManager("mlx", machine=MACHINES["linux_mlx"])
    assert (manager.backend, manager.device, manager.report.dtypes[0]) == (
        "mlx",
        "cpu",
        "fp32",
    ) and "slow" in manager.report.slow[""]


def test_usage_of_the_reference_document(capsys, monkeypatch):
    """reference/backend_support.md, as written there."""
    manager = BackendManager(verbose=True)
    assert manager.verbose
    printed = capsys.readouterr().out
    for word in ("System:", "Backend: cpu", "Dtypes:", "Quantizers:", "Total memory:", "Available memory:", "GiB"):
        assert word in printed
    manager = BackendManager(backend="auto", verbose=False)
    assert capsys.readouterr().out == ""
    assert manager.supports_quantization(4)
    assert manager.supports_quantization(16)
    assert not manager.supports_quantization(3)
    assert manager.get_optimal_batch_size(model_size_b=7) >= 1
    monkeypatch.setenv("FSDP_BACKEND", "cpu")
    assert BackendManager.from_env().backend is Backend.CPU
    monkeypatch.setenv("FSDP_BACKEND", "cuda")
    with pytest.raises(ValueError, match="Backend 'cuda' is not available"):
        BackendManager.from_env()
    monkeypatch.delenv("FSDP_BACKEND")
    assert BackendManager.from_env().backend == "cpu"
    assert detect_backend() is Backend.CPU
    assert get_device() == "cpu"
    assert torch.zeros(1, device=get_device("cpu")).device.type == "cpu"
    assert get_backend_manager("cpu").backend == Backend("cpu") == "cpu"


def test_memory_info_counts_bytes_and_prints_units():
    info = BackendManager("cpu").get_memory_info()
    assert 0 < info["rss"] < info["total"]
    assert 0 < info["available"] <= info["total"]
    held = mmap.mmap(-1, 64 << 20)  # from the system itself: malloc may have a hole of an earlier test for it
    held.write(bytes(len(held)))
    assert BackendManager("cpu").get_memory_info()["rss"] - info["rss"] > 0.9 * len(held)
    assert "Total memory: " in str(info)
    assert (
        str(BackendManager(machine=MACHINES["a100"]).get_memory_info())
        == "Total memory: 39.4 GiB\nAvailable memory: 38.9 GiB"
    )


def a100_with(gib: int, free: float = 0.97):
    """An A100 with another memory."""
    device = replace(MACHINES["a100"].cuda[0], memory_total=gib << 30, memory_free=int(gib * free * 2**30))
    return BackendManager("cuda", machine=without(MACHINES["a100"], cuda=(device,)))


def test_batch_size_grows_as_memory_does():
    """By hand: what rows take beside the model is in proportion to them, so that rows are to the memory that is left;
    one row more than the answer is not predicted to fit.
    """
    rows = {gib: a100_with(gib).get_optimal_batch_size(7) for gib in range(8, 160, 8)}
    left = {gib: 0.9 * 0.97 * gib * 2**30 - (a100_with(gib)._needed(7, 2, 2048) - each()) for gib in rows}
    assert all(abs(rows[gib] - (left[gib] / each() + 1)) <= 1 for gib in rows), rows
    assert len({rows[gib] for gib in rows}) == len(rows) and any(n & (n - 1) for n in rows.values())
    for gib, count in rows.items():
        manager = a100_with(gib)
        assert manager._fits(7, count, 2048) and not manager._fits(7, count + 1, 2048)


def each() -> int:
    """Bytes that a row more takes."""
    manager = a100_with(80)
    return manager._needed(7, 21, 2048) - manager._needed(7, 20, 2048)


@pytest.mark.parametrize("length", [128, 2048, 32768])
@pytest.mark.parametrize("gib", [4, 8, 24, 80])
def test_a_batch_for_what_does_not_fit_says_so(gib, length):
    """Reference: validate_model_size, of the same rows."""
    manager = a100_with(gib)
    for billions in (1, 3, 7, 13, 34, 70):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rows = manager.get_optimal_batch_size(billions, length)
        assert bool(said) is not manager.validate_model_size(billions, length), (gib, length, billions)
        assert rows == 1 if said else rows >= 1
        assert all(f"{billions} billion" in str(w.message) and "GiB are free" in str(w.message) for w in said)


def test_a_batch_where_the_memory_is_unknown_says_so():
    device = replace(MACHINES["a100"].cuda[0], memory_free=None)
    manager = BackendManager("cuda", machine=without(MACHINES["a100"], cuda=(device,)))
    with pytest.warns(UserWarning, match="the free memory is not known"):
        assert manager.get_optimal_batch_size(7) == 1


@pytest.mark.filterwarnings("ignore:QLoRA of a model")
@pytest.mark.parametrize("name", EXPECTED)
def test_batch_size_is_monotone_and_never_zero(name):
    manager = BackendManager(machine=MACHINES[name])
    by_size = [manager.get_optimal_batch_size(billions) for billions in (0.1, 0.3, 1, 1.5, 3, 7, 8, 13, 34, 70, 400)]
    by_length = [manager.get_optimal_batch_size(7, length) for length in (128, 512, 2048, 8192, 131072)]
    assert by_size == sorted(by_size, reverse=True)
    assert by_length == sorted(by_length, reverse=True)
    assert min(by_size + by_length) == 1
    fits = [manager.validate_model_size(billions) for billions in (0.1, 1, 3, 7, 13, 34, 70, 400)]
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    assert not fits[-1]


def test_known_sizes():
    """8B in 4 bits fits a 16 GB card and 70B an H200, neither the other way round (fsdp_qlora, FACTS)."""
    assert BackendManager(machine=MACHINES["t4"]).validate_model_size(8)
    assert not BackendManager(machine=MACHINES["t4"]).validate_model_size(34)
    assert BackendManager(machine=MACHINES["h200"]).validate_model_size(70)
    assert not BackendManager(machine=MACHINES["a100"]).validate_model_size(70)


# ---------------------------------------------------------------------------------------------------------- observing


def test_observe_reports_this_machine():
    assert THIS.torch["version"] == torch.__version__
    assert THIS.memory_total >= THIS.memory_available > 0
    assert THIS.bitsandbytes == {"version": bitsandbytes.__version__, "library": "libbitsandbytes_cpu.so"}
    assert quantizes(torch, "cpu")


def test_observing_imports_torch_and_no_other_framework():
    code = (
        "import sys, json, backend_manager; backend_manager.BackendManager('cpu').available(); "
        "print(json.dumps([m for m in ('transformers', 'peft', 'bitsandbytes', 'mlx', 'accelerate', 'triton') if m in "
        "sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert json.loads(out) == []


KINDS = ("cpu", "cuda118", "cuda126", "cuda128", "cuda130", "cuda132", "rocm64", "rocm72", "xpu2025", "xpu2026")
FILES = [f"libbitsandbytes_{kind}.so" for kind in KINDS]


@pytest.mark.parametrize(
    ("build", "has_cuda", "library"),
    [
        ({"cuda": "12.8"}, True, "cuda128"),
        ({"cuda": "12.9"}, True, "cuda128"),
        ({"cuda": "12.1"}, True, "cuda126"),
        ({"cuda": "13.1"}, True, "cuda130"),
        ({"cuda": "14.0"}, True, ""),
        ({"cuda": "12.8"}, False, "cpu"),
        ({"hip": "7.2.1"}, True, "rocm72"),
        ({"hip": "6.4"}, True, "rocm64"),
        ({"xpu": "20260101"}, False, "xpu2026"),
        ({}, False, "cpu"),
    ],
)
def test_native_library_is_the_one_that_bitsandbytes_takes(build, has_cuda, library):
    class Build:
        cuda, hip, xpu = build.get("cuda"), build.get("hip"), build.get("xpu")

    assert native_library(FILES, Build, has_cuda) == (f"libbitsandbytes_{library}.so" if library else "")


# -------------------------------------------------------------------------------------------------- the table's cells


TESTED = [(backend, column, cell) for backend, column, cell, tested in backends.cells() if tested]


def test_what_is_tested_on_hardware():
    """MLX's Linux build is a CPU's too; its cells are run by tests/on_mlx, CUDA's by tests/on_torch/test_gpu.py."""
    assert {backend for backend, _, _ in TESTED} == {"cpu", "mlx", "cuda"}
    assert {cell for backend, _, cell in TESTED if backend == "cuda"} >= {"nf4", "bf16", "single", "triton"}
    assert not {cell for backend, _, cell in TESTED if backend == "cuda"} & {"ddp", "fsdp", "deepspeed", "dora"}
    assert "Linux CPU build" in CAPABILITIES[Backend.MLX].notes


def test_cells_are_names_of_the_tables():
    known = {
        "dtypes": {"bf16", "fp16", "fp32"},
        "quantizers": registry.QUANTIZERS,
        "optimizers": registry.OPTIMIZERS,
        "kernels": registry.KERNELS,
        "products": registry.FROZEN_MATMULS,
        "strategies": registry.STRATEGIES,
        "adapters": registry.ADAPTERS,
    }
    for _, column, cell, _ in backends.cells():
        assert cell in known[column]
    assert set(LOOPS) == {row.framework for row in CAPABILITIES.values()}


@pytest.mark.parametrize("dtype", [cell for backend, column, cell in TESTED if column == "dtypes" and backend == "cpu"])
def test_tested_dtype_multiplies(dtype):
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal((x.to(kind) @ torch.eye(4).to(kind)).float(), x)


@pytest.mark.parametrize(
    "quantizer",
    [
        cell
        for backend, column, cell in TESTED
        if column == "quantizers" and backend == "cpu" and not registry.QUANTIZERS[cell].group
    ],
)
def test_tested_quantizer_gives_a_product_and_its_gradient(quantizer):
    """Reference: the float32 product; half the levels of the range per weight is the most that rounding may cost."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 64, bias=False)
    makers = {
        "nf4": lambda: bitsandbytes.nn.Linear4bit(128, 64, False, torch.float32, quant_type="nf4"),
        "fp4": lambda: bitsandbytes.nn.Linear4bit(128, 64, False, torch.float32, quant_type="fp4"),
        "int8": lambda: bitsandbytes.nn.Linear8bitLt(128, 64, False, has_fp16_weights=False),
        "none": lambda: torch.nn.Linear(128, 64, bias=False),
    }
    quantized = makers[quantizer]()
    quantized.load_state_dict(plain.state_dict())
    quantized = quantized.to("cpu")
    x = torch.randn(8, 128, requires_grad=True)
    error = (quantized(x) - plain(x)).norm() / plain(x).norm()
    assert error < {"nf4": 0.15, "fp4": 0.2, "int8": 0.02, "none": 1e-6}[quantizer]
    gradient = torch.autograd.grad(quantized(x).sum(), x)[0]
    assert (gradient - plain.weight.sum(0)).norm() / plain.weight.sum(0).norm() < 0.5


@pytest.mark.parametrize(
    "optimizer", [cell for backend, column, cell in TESTED if column == "optimizers" and backend == "cpu"]
)
def test_tested_optimizer_goes_downhill(optimizer):
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(8192))
    row = registry.OPTIMIZERS[optimizer]
    steps = row.load()([x], lr=1.0 if optimizer == "adadelta" else 0.1, **row.options)
    before = float(x.detach().norm())
    for _ in range(10):
        x.square().sum().backward()
        steps.step()
        steps.zero_grad()
    assert float(x.detach().norm()) < before


def test_markdown_has_every_cell_and_marks_the_tested(capsys):
    assert backends.main(["--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for backend, _, cell, tested in backends.cells():
        row = next(line for line in lines if line.startswith(f"| {backend} "))
        assert (f"{cell} {backends.TESTED}" in row) == tested
        assert cell in row


def test_backends_verb_says_what_this_machine_does(capsys):
    assert backends.main([]) == 0
    out = capsys.readouterr().out
    assert "cuda  no: torch" in out
    assert "cpu   yes:" in out
    assert out.endswith("auto takes cpu\n")
    with pytest.raises(UsageError, match="unexpected argument"):
        backends.main(["--json"])


# -------------------------------------------------------------------------------------------------------- third parties


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    """A directory with a third-party backend, installed by pip as anybody would."""
    source, target = tmp_path_factory.mktemp("source") / "acme", tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGES / "anyqlora_acme", source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True, capture_output=True)
    return target


def test_third_party_backend_is_found_planned_and_held_to_its_row(acme, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(acme))
    assert anyqlora(["backends"]) == 0
    out = capsys.readouterr().out
    assert "acme  yes: Acme 1" in out
    assert out.endswith("auto takes cpu\n")
    assert anyqlora(["plan", "--backend", "acme", "--precision", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "backend     acme (torch, device cpu)" in out
    assert "precision: asked bf16, got fp32: backend acme does not compute in bf16" in out
    assert anyqlora(["plan", "--backend", "acme", "--bits", "8"]) == 2
    assert "backend acme has no int8" in capsys.readouterr().err
    manager = BackendManager("acme")
    assert manager.backend == "acme"
    assert manager.supports_quantization(4)
    assert not manager.supports_quantization(8)


def test_third_party_backend_trains(acme, monkeypatch, tmp_path):
    """The reference is the same run on the built-in backend of the same device."""
    monkeypatch.syspath_prepend(str(acme))
    settings = {
        "model_name": "demo",
        "dataset": "demo",
        "precision": "fp32",
        "max_steps": 2,
        "context_length": 128,
        "log_to": "none",
    }
    theirs, ours = (runs.run(tmp_path, name, backend=name, **settings) for name in ("acme", "cpu"))
    assert json.loads((theirs / "result.json").read_text())["backend"] == "acme"
    assert (theirs / "adapter/adapter_model.safetensors").read_bytes() == (
        ours / "adapter/adapter_model.safetensors"
    ).read_bytes()


def test_broken_plugin_is_named_and_harms_nobody(tmp_path, monkeypatch, capsys):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[anyqlora.backends]\nbroken = no_such_module:spec\nodd = json:dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert anyqlora(["backends"]) == 0
    out = capsys.readouterr().out
    assert "broken no: no_such_module:spec: backend plugin 'broken' cannot be imported" in out
    assert "not a BackendSpec" in out
    assert anyqlora(["plan", "--backend", "broken"]) == 2
    assert "cannot be imported" in capsys.readouterr().err


FAULTY = """
import sys

from anyqlora.extend import BackendReport, BackendSpec, Capabilities, Machine

ROW = Capabilities("torch", "cpu", ("fp32",), ("none",), ("adamw",), notes="broken")
WHOLE = {"dtypes": ("fp32",), "quantizers": ("none",), "optimizers": ("adamw",)}


def read_driver(machine: Machine) -> int:
    return machine.torch["no such key"]


def spec(probe):
    return BackendSpec("broken", ROW, probe, "cpu")


RAISES = spec(read_driver)
DEEPER = spec(lambda machine: BackendReport(True, **WHOLE, reasons=dict(int("many"))))
EXITS = spec(lambda machine: sys.exit("no driver"))
NOTHING = spec(lambda machine: None)
EMPTY = spec(lambda machine: BackendReport(available=True, dtypes=("fp32",)))
ROWLESS = BackendSpec("broken", {"dtypes": ["fp32"]}, read_driver, "cpu")
"""
LINE_OF_DRIVER = 1 + next(n for n, line in enumerate(FAULTY.splitlines()) if "no such key" in line)
LINE_OF_EXIT = 1 + next(n for n, line in enumerate(FAULTY.splitlines()) if "sys.exit" in line)


@pytest.mark.parametrize(
    ("target", "line", "why"),
    [
        ("RAISES", LINE_OF_DRIVER, "the probe of backend plugin 'broken' raises KeyError: 'no such key'"),
        ("DEEPER", LINE_OF_EXIT - 1, "raises ValueError: invalid literal for int"),
        ("EXITS", LINE_OF_EXIT, "raises SystemExit: no driver"),
        ("NOTHING", 0, "gives NoneType, not a BackendReport"),
        ("EMPTY", 0, "reports no quantizers and no optimizers"),
        ("ROWLESS", 0, "its capabilities are dict, not Capabilities"),
    ],
)
def test_a_probe_that_raises_is_its_backends_absence(target, line, why, tmp_path, monkeypatch, capsys):
    """With the plugin's own file and line; the others are listed as before, and `auto` takes the same one."""
    expected = BackendManager().backend
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[anyqlora.backends]\nbroken = faulty_backend:{target}\n")
    (tmp_path / "faulty_backend.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faulty_backend", raising=False)
    place = f"{tmp_path / 'faulty_backend.py'}:{line}" if line else f"faulty_backend:{target}"
    assert anyqlora(["backends"]) == 0
    out = capsys.readouterr().out
    listed = next(line for line in out.splitlines() if line.startswith("broken"))
    assert listed.startswith(f"broken no: {place}: ") and why in listed
    assert "cpu   yes:" in out and out.endswith(f"auto takes {expected}\n")
    assert "broken" not in BackendManager().available()
    assert anyqlora(["plan", "--backend", "broken"]) == 2
    err = capsys.readouterr().err
    assert place in err and why in err and "Traceback" not in err


def test_a_backend_that_raises_on_import_is_named_by_its_line(tmp_path, monkeypatch):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[anyqlora.backends]\nbroken = half_a_backend:SPEC\nodd = no_python:SPEC\n")
    (tmp_path / "half_a_backend.py").write_text("import json\nSPEC = json.loads('{')\n")
    (tmp_path / "no_python.py").write_text("x = 1\ndef\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = BackendManager()
    assert f"({tmp_path / 'half_a_backend.py'}:2)" in manager.probe("broken").why("available")
    assert f"({tmp_path / 'no_python.py'}:2)" in manager.probe("odd").why("available")
