"""What a process knows of the machine around it."""

import os
import sys
from types import SimpleNamespace

import pytest

from ingot.core import process


@pytest.mark.parametrize(("worked", "found"), [(0.0, False), (0.01, False), (0.03, True), (0.2, True)])
def test_a_machine_is_busy_where_others_work_a_fifth_of_the_time(
    monkeypatch: pytest.MonkeyPatch, worked: float, found: bool
) -> None:
    seen = iter([100.0, 100.0 + worked])
    monkeypatch.setattr(process, "_cpu_seconds", lambda: next(seen))
    assert process.machine_is_busy(0.1) == found


def test_where_the_system_does_not_say_no_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> float:
        raise FileNotFoundError("/proc/stat")

    monkeypatch.setattr(process, "_cpu_seconds", silent)
    assert not process.machine_is_busy(0.0)


def test_what_all_cores_have_worked_grows() -> None:
    before = process._cpu_seconds()
    for _ in range(3_000_000):
        pass
    assert process._cpu_seconds() > before > 0


def test_cores_and_memory_as_macos_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(process.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    assert process.peak_memory_bytes() == 1024 * 3_000_000
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process.peak_memory_bytes() == 3_000_000
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process.usable_cores() == os.cpu_count()
