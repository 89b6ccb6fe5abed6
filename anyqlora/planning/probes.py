"""What this machine does of each backend, and why less than the table says."""

from __future__ import annotations

from anyqlora.core.registry import KERNELS, QUANTIZERS, needing
from anyqlora.planning.capabilities import (
    FLOAT8_FROM,
    NEEDS_BITSANDBYTES,
    Backend,
    BackendReport,
    Capabilities,
    _called,
    _no_bf16,
)
from anyqlora.planning.machine import FEATURES_VARIABLE, Device, Machine

PORTABLE_PRICE = "1.3 to 1.5"  # docs/performance.md: 316 and 340 tokens/s beside 481 and 434


def _absent(why: str) -> BackendReport:
    return BackendReport(available=False, reasons={"available": why})


def _narrowed(
    capabilities: Capabilities, machine: Machine, devices: tuple[Device, ...], lacks: dict[str, str], **more
) -> BackendReport:
    """The row without the cells in `lacks` (cell -> why)."""
    lacks = dict(lacks)
    if machine.bitsandbytes.get("error"):
        lacks = dict.fromkeys(NEEDS_BITSANDBYTES, str(machine.bitsandbytes["error"])) | lacks
    if capabilities.collective and capabilities.collective not in machine.torch.get("collectives", ()):
        lacks["collective"] = f"this torch has no {capabilities.collective}"
    collective = "gloo" if "collective" in lacks and "gloo" in machine.torch.get("collectives", ()) else None
    cells = {
        name: tuple(cell for cell in getattr(capabilities, name) if cell not in lacks)
        for name in ("dtypes", "quantizers", "optimizers", "kernels")
    }
    return BackendReport(
        True,
        devices,
        **{**cells, **more},
        cores=machine.cores,
        threads=machine.threads,
        collective=collective if "collective" in lacks else capabilities.collective,
        reasons=lacks,
    )


def _slow_quantizers(backend: Backend) -> dict[str, str]:
    return {name: row.slow[backend] for name, row in QUANTIZERS.items() if backend in row.slow}


def _torch_gpu(
    capabilities: Capabilities, machine: Machine, *, build: str, maker: str, devices: tuple[Device, ...], error: str
) -> BackendReport:
    torch = machine.torch
    if torch.get("error"):
        return _absent(torch["error"])
    if not torch.get(build):
        return _absent(f"torch {torch.get('version')} is not built for {maker} GPUs")
    if not devices:
        return _absent(error or f"torch finds no {maker} GPU")
    first, lacks, slow = devices[0], _no_bf16(devices[:1]), {}
    if "triton" in capabilities.kernels and machine.triton.get("version", "") == "":
        why = machine.triton.get("error") or "triton was not looked for"
        lacks |= dict.fromkeys(needing("triton", KERNELS), why)
        slow["kernels"] = (
            f"{why}, so portable kernels run: 4-bit weights are unpacked and positions rotated in several launches "
            "instead of one each, at a price that nobody has measured here: pip install triton"
        )
    products = capabilities.products
    if "fp8" in products and tuple(map(int, first.capability.split("."))) < FLOAT8_FROM:
        lacks["fp8 products"], products = f"{_called(first)} does not multiply float8", ("full",)
    return _narrowed(capabilities, machine, devices, lacks, products=products, slow=slow)


def _cuda(capabilities, machine):
    return _torch_gpu(
        capabilities,
        machine,
        build="cuda",
        maker="NVIDIA",
        devices=machine.cuda,
        error=machine.torch.get("cuda_error", ""),
    )


def _rocm(capabilities, machine):
    return _torch_gpu(
        capabilities, machine, build="hip", maker="AMD", devices=machine.cuda, error=machine.torch.get("cuda_error", "")
    )


def _xpu(capabilities, machine):
    return _torch_gpu(
        capabilities, machine, build="xpu", maker="Intel", devices=machine.xpu, error=machine.torch.get("xpu_error", "")
    )


def _mps(capabilities, machine):
    mps = machine.mps
    if machine.torch.get("error"):
        return _absent(machine.torch["error"])
    if not mps.get("built"):
        return _absent(f"torch {machine.torch.get('version')} is not built with MPS")
    if not mps.get("available"):
        return _absent(f"this torch's MPS needs a newer macOS than {machine.os_version}, or there is no Metal device")
    if not mps.get("allocates"):
        return _absent(f"MPS cannot allocate: {mps.get('error', 'no reason given')}")
    lacks = {} if mps.get("bf16") else {"bf16": f"bf16 products fail on MPS here: {mps.get('error') or 'wrong result'}"}
    if not mps.get("quantizes"):
        lacks |= dict.fromkeys(
            NEEDS_BITSANDBYTES, f"4-bit quantization fails on MPS here: {mps.get('error') or 'wrong result'}"
        )
    slow = dict.fromkeys(
        needing("bitsandbytes", QUANTIZERS),
        "quantized weights run on torch fallback kernels, slower than 16-bit weights",
    )
    free = min(mps["memory_free"], machine.memory_available)  # the GPU's memory is the host's
    return _narrowed(
        capabilities, machine, (Device("Metal", "", mps["memory_total"], free, mps["bf16"]),), lacks, slow=slow
    )


def _mlx(capabilities, machine):
    if machine.mlx.get("error"):
        return _absent(machine.mlx["error"])
    build = machine.mlx.get("build", "")
    has_metal = machine.system == "Darwin" and build == "mlx-metal"
    lm = machine.mlx.get("lm_version", "")
    if not build or not lm:
        lacking = "mlx-lm" if build else "mlx's device code (mlx-metal, or mlx-cpu on Linux)"
        return _absent(
            f"mlx {machine.mlx.get('version')} is installed without {lacking}: pip install 'mlx[cpu]' mlx-lm (on a "
            f"Mac: mlx mlx-lm)"
        )
    if has_metal and machine.mps.get("built") and not machine.mps.get("available"):
        return _absent("Metal finds no GPU here, as in a virtual machine or without a screen")
    room = _metal_memory(machine) if has_metal else machine.memory_total
    device = Device(f"mlx {machine.mlx.get('version')} ({build})", "", room, min(room, machine.memory_available), True)
    slow = _slow_quantizers(Backend.MLX)
    dtypes = capabilities.dtypes
    if build == "mlx-cpu":
        slow[""] = "mlx's CPU build is there to try things out, and slow"
        dtypes = ("fp32", "bf16", "fp16")  # 16-bit products are ten times slower there
    return BackendReport(
        True,
        (device,),
        tuple(d for d in dtypes if d in capabilities.dtypes),
        capabilities.quantizers,
        capabilities.optimizers,
        capabilities.collective,
        automatic=has_metal,
        device="cpu" if build == "mlx-cpu" else "",
        slow=slow,
    )


def _metal_memory(machine) -> int:
    """Bytes that stay resident for a Mac's GPU: what Metal recommends, or two thirds of the memory, which is the least
    that it does.
    """
    return machine.mps.get("memory_total") or machine.memory_total * 2 // 3


def _cpu(capabilities, machine):
    if machine.torch.get("error"):
        return _absent(machine.torch["error"])
    is_fast = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_features))
    slow = {"": "training on a CPU is slow", **_slow_quantizers(Backend.CPU)}
    if not is_fast:
        slow["bf16"] = "bf16 is emulated on this CPU, slower than fp32"
    dtypes = ("bf16", "fp32", "fp16") if is_fast else ("fp32", "bf16", "fp16")
    device = Device(
        f"{machine.arch}, {machine.cores} cores", "", machine.memory_total, machine.memory_available, is_fast
    )
    allowed = f" that {FEATURES_VARIABLE}={machine.cpu_limit} allows" if machine.cpu_limit else ""
    missing, price = _native_kernels(machine, allowed)
    if price:
        slow["kernels"] = f"{missing}, so {price}"
    elif not missing and machine.prebuilt.get("error"):
        slow["native"] = f"kernels are compiled here at first use: {machine.prebuilt['error']}"
    kernels = ("portable",) if missing else capabilities.kernels
    kernels += needing("triton", KERNELS) if machine.triton.get("interpreted") else ()  # slow: for tests
    lacks = {"native": missing} if missing else {}
    if missing or "avx512_vnni" not in machine.cpu_features:
        lacks["fused head"] = missing or f"this processor has no AVX512-VNNI{allowed}"
    elif "amx_bf16" in machine.cpu_features:
        lacks["fused head"] = "this processor has AMX, by which the framework's products are several times as fast"
    products = capabilities.products
    lacking = ""
    if not {"avx512_vnni", "amx_int8"} & set(machine.cpu_features):
        lacking = f"this processor has neither AVX512-VNNI nor AMX{allowed}"
    elif machine.onednn_limit:
        lacking = f"{machine.onednn_limit} keeps the framework's products from AVX512-VNNI"
    if lacking:
        lacks |= dict.fromkeys((f"{kind} products" for kind in products if kind != "full"), lacking)
        products = ("full",)
    return _narrowed(
        capabilities,
        machine,
        (device,),
        lacks,
        dtypes=tuple(d for d in dtypes if d in capabilities.dtypes),
        kernels=kernels,
        slow=slow,
        products=products,
    )


def _native_kernels(machine: Machine, allowed: str) -> tuple[str, str]:
    """(why the C kernels cannot be had; "" where they can, what that costs and how it is mended; "" where nothing mends
    it).
    """
    if machine.system != "Linux":
        return "the C kernels are for Linux", ""
    if "avx512_bf16" not in machine.cpu_features:
        return (
            f"this processor has no AVX512-BF16{allowed}",
            "portable kernels run; where it is there (AMD from Zen 4 on, Intel Sapphire Rapids and later) bf16 steps "
            "run "
            f"on C kernels, and portable ones take {PORTABLE_PRICE} times as long",
        )
    if machine.compiler or machine.prebuilt.get("level"):
        return "", ""
    missing = "no C compiler is here"
    if machine.prebuilt.get("error"):
        missing += f", and the compiled kernels of this installation are not used ({machine.prebuilt['error']})"
    cure = "apt-get install gcc (or CC=PATH of yours), or install the wheel that carries compiled kernels"
    return missing, f"portable kernels run, by which a bf16 step takes {PORTABLE_PRICE} times as long: {cure}"


_PROBES = {
    Backend.CUDA: (_cuda, "cuda:0"),
    Backend.ROCM: (_rocm, "cuda:0"),
    Backend.XPU: (_xpu, "xpu:0"),
    Backend.MLX: (_mlx, "gpu"),
    Backend.MPS: (_mps, "mps"),
    Backend.CPU: (_cpu, "cpu"),
}
