"""What this machine has, and GPUs by the names that drivers give them."""

import subprocess

import pytest

from ingot.plan import machine


@pytest.mark.parametrize(
    ("driver", "name", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100", 312),
        ("NVIDIA H100 80GB HBM3", "H100", 989),
        ("NVIDIA L40S", "L40S", 362),
        ("NVIDIA L4", "L4", 121),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165),
        ("Tesla V100-SXM2-16GB", "V100", 125),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(driver: str, name: str, tera: int) -> None:
    found = machine.gpu_from_driver(driver, 40 << 30, 8.0)
    assert (found.name, found.peak, found.memory) == (name, tera * 1e12, 40 << 30)


def test_an_unknown_gpu_keeps_its_name_and_has_no_peak() -> None:
    found = machine.gpu_from_driver("Some Card 9", 8 << 30, 6.1)
    assert (found.name, found.peak, found.half) == ("Some Card 9", None, None)
    for name in ("NVIDIA RTX A1000 Laptop GPU", "NVIDIA L40", "NVIDIA T400 4GB"):
        assert machine.gpu_from_driver(name, 8 << 30, 8.6).peak is None, "its name only begins like another's"


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda _: "/bin/nvidia-smi")

    def answer(*_: object, **__: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess([], 0, "Tesla T4, 15360, 7.5\nTesla T4, 15360, 7.5\n", "")

    monkeypatch.setattr(machine.subprocess, "run", answer)
    assert machine.this_machine() == machine.Device("T4", 15360 << 20, 65e12, "fp16")
    assert machine.this_machine().is_gpu
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not machine.this_machine().is_gpu


def test_without_a_gpu_it_is_the_cpu_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    found = machine.this_machine()
    assert found.name == "CPU"
    assert not found.is_gpu
    assert 1 << 28 < found.memory < 1 << 50
