"""A backend for Acme's accelerator, which torch sees as its CPU: float32 only, no 8-bit weights."""

from anyqlora.extend import BackendReport, BackendSpec, Capabilities, Device, Machine

capabilities = Capabilities(
    framework="torch",
    device="cpu",
    dtypes=("fp32",),
    quantizers=("nf4", "none"),
    optimizers=("adamw", "sgd"),
    notes="Acme's accelerator",
)


def probe(machine: Machine) -> BackendReport:
    if machine.torch.get("error"):
        return BackendReport(available=False, reasons={"available": machine.torch["error"]})
    lacks = {"nf4": machine.bitsandbytes["error"]} if machine.bitsandbytes.get("error") else {}
    return BackendReport(
        available=True,
        devices=(Device("Acme 1", memory_total=machine.memory_total, memory_free=machine.memory_available),),
        dtypes=capabilities.dtypes,
        quantizers=tuple(q for q in capabilities.quantizers if q not in lacks),
        optimizers=capabilities.optimizers,
        reasons=lacks,
    )


spec = BackendSpec(name="acme", capabilities=capabilities, probe=probe, device="cpu")
