"""What every backend passes: its probe judges and touches nothing, what a machine lacks has a reason, and a run is
planned and trained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import anyqlora
from anyqlora.extend import BackendReport, BackendSpec, Machine
from anyqlora.planning.backends import BackendManager
from anyqlora.planning.machine import observe

CELLS = ("dtypes", "quantizers", "optimizers", "kernels", "products")


class BackendContract:
    """Subclass it in a test module.

    backend: its name, built in or of an installed package. machine: a described machine that has it; None: this one,
    which then has to have it. settings: of the embedded job, where the defaults of `auto` do not fit.
    """

    backend = ""
    machine: Machine | None = None
    settings: dict[str, Any] = {}

    @property
    def here(self) -> Machine:
        return self.machine or observe()

    def spec(self) -> BackendSpec:
        return BackendManager("auto", machine=self.here).spec(self.backend)

    def report(self) -> BackendReport:
        return self.spec().probe(self.here)

    def test_the_row_is_whole(self) -> None:
        spec = self.spec()
        capabilities = spec.capabilities
        assert spec.name == self.backend and spec.device and capabilities.device and capabilities.notes
        assert capabilities.framework in ("torch", "mlx")
        assert all(
            (
                capabilities.dtypes,
                capabilities.quantizers,
                capabilities.optimizers,
                capabilities.strategies,
                capabilities.adapters,
                capabilities.kernels,
                capabilities.products,
            )
        )
        assert "single" in capabilities.strategies and "full" in capabilities.products
        assert set(capabilities.dtypes) <= {"fp32", "bf16", "fp16"}

    def test_a_probe_judges_and_touches_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        machine = self.here
        before = machine.to_dict()
        first, second = self.spec().probe(machine), self.spec().probe(machine)
        assert first == second and machine.to_dict() == before
        assert capfd.readouterr() == ("", "")

    def test_the_machine_has_it_and_does_not_more_than_the_row(self) -> None:
        capabilities, report = self.spec().capabilities, self.report()
        assert report.available, report.why("available")
        assert report.devices and all(device.name for device in report.devices)
        assert report.dtypes and report.quantizers and report.optimizers
        for cells in CELLS:
            assert set(getattr(report, cells)) <= set(getattr(capabilities, cells)), cells

    def test_what_the_machine_lacks_has_a_reason(self) -> None:
        capabilities, report = self.spec().capabilities, self.report()
        for cells in CELLS:
            for cell in set(getattr(capabilities, cells)) - set(getattr(report, cells)):
                name = f"{cell} products" if cells == "products" else cell  # int8 is a quantizer, too
                assert report.why(name), f"{name} is not there, and nobody says why"

    def test_a_machine_where_nothing_is_installed_lacks_it_or_does_less(self) -> None:
        nothing = Machine(
            system="Linux", os_version="", arch="x86_64", python="3.11", cores=1, memory_total=1 << 33,
            memory_available=1 << 33, torch={"error": "torch is not installed"},
            bitsandbytes={"error": "bitsandbytes is not installed"},
        )  # fmt: skip
        report = self.spec().probe(nothing)
        assert not report.available and report.why("available")

    def test_the_embedded_job_is_planned(self) -> None:
        manager = BackendManager(self.backend, machine=self.machine)
        config = anyqlora.resolve({"backend": self.backend, **self.settings}, environ={})
        plan = manager.plan(config)
        assert plan == manager.plan(config), "a plan is made of its configuration alone"
        assert plan.backend == self.backend and plan.quantizer in self.report().quantizers
        assert plan.memory is None or plan.memory.total > 0
        assert plan.explain()

    def test_the_embedded_job_is_trained(self, tmp_path: Path) -> None:
        if self.machine is not None and self.machine != observe():
            pytest.skip("the machine is a described one")
        result = anyqlora.train(
            backend=self.backend, max_steps=3, samples=0, output_dir=str(tmp_path), run_name="run", log_to="none",
            **self.settings,
        )  # fmt: skip
        before, after = result["eval"]["before"]["loss"], result["eval"]["after"]["loss"]
        assert result["backend"] == self.backend and math.isfinite(after) and after < before
        model = anyqlora.load_finetuned(tmp_path / "run")
        assert abs(model.evaluate()["loss"] / after - 1) < 1e-4
        assert isinstance(model.generate("Name three colours."), str)
