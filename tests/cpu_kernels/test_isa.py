"""The ISA probe: real instructions here, a child that dies on purpose, machines that nobody knows."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from hetero_cpu_kernels import isa
from hetero_cpu_kernels.instructions import INSTRUCTIONS, instruction
from hetero_cpu_kernels.isa import claimed_flags, executes, probe_isa, run_probes

# A child that speaks the protocol: `trap` dies by SIGILL, `hang` never answers, `no` is refused.
CHILD = """
import os, signal, sys, time
open(sys.argv[1], "a").write("started\\n")
for name in sys.argv[2:]:
    print("start", name, flush=True)
    if name.startswith("trap"):
        os.kill(os.getpid(), signal.SIGILL)
    if name == "hang":
        time.sleep(60)
    if name == "no":
        print("refused", name, "not today", flush=True)
    else:
        print("result", name, len(name), flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "children"


@pytest.fixture
def child(log: Path) -> list[str]:
    return [sys.executable, "-c", CHILD, str(log)]


def num_children(log: Path) -> int:
    return len(log.read_text().splitlines())


def test_one_child_runs_all_that_execute(child: list[str], log: Path) -> None:
    assert run_probes(["a", "bb", "no"], child) == {"a": 1, "bb": 2, "no": "not today"}
    assert num_children(log) == 1


def test_a_new_child_goes_on_behind_the_one_that_trapped(child: list[str], log: Path) -> None:
    answers = run_probes(["a", "trap1", "bb", "trap2", "ccc"], child)
    killed = "the child was killed by SIGILL"
    assert answers == {"a": 1, "trap1": killed, "bb": 2, "trap2": killed, "ccc": 3}
    assert num_children(log) == 3


def test_an_instruction_that_hangs_is_given_up(child: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "_TIMEOUT_S", 1.0)
    assert run_probes(["a", "hang", "bb"], child) == {"a": 1, "hang": "no answer in 1 s", "bb": 2}


def test_a_child_that_fails_before_the_first_instruction_is_not_tried_again() -> None:
    answers = run_probes(["a", "b"], [sys.executable, "-c", "raise SystemExit('no compiler here')"])
    assert set(answers) == {"a", "b"}
    assert all(
        "not probed: the child ended with code 1: no compiler here" in str(a) for a in answers.values()
    )


def test_a_child_that_cannot_start_is_a_fact(tmp_path: Path) -> None:
    answers = run_probes(["a"], [str(tmp_path / "nothing")])
    assert "no child process could be started" in str(answers["a"])


def test_this_machine_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_isa()
    assert {one.name for one in found} == {i.name for i in INSTRUCTIONS if i.machine == platform.machine()}
    assert all(one.executes != bool(one.detail) for one in found)
    monkeypatch.setattr(isa, "run_probes", None)
    assert probe_isa() is found


def test_the_baseline_of_this_machine_executes() -> None:
    baseline = {"x86_64": "avx2", "aarch64": "neon"}.get(platform.machine())
    if baseline is None or not set(instruction(baseline).flags) <= claimed_flags(Path("/proc/cpuinfo")):
        pytest.skip("this processor claims neither AVX2 nor NEON")
    assert executes(baseline)


def test_an_unknown_machine_has_no_known_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    probe_isa.cache_clear()
    try:
        assert probe_isa() == ()
        assert not executes("avx2")
    finally:
        probe_isa.cache_clear()


def test_a_wrong_answer_does_not_count_as_executing() -> None:
    judged = isa._judge(instruction("avx512f"), 41, frozenset({"avx512f"}))
    assert (judged.is_claimed, judged.executes) == (True, False)
    assert judged.detail == "gave 0x29 instead of 0x2a"


def test_a_name_that_no_machine_has_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown instruction set 'avx1024'; known: avx2, "):
        executes("avx1024")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n\nflags : other\n", {"fpu", "avx2", "fma"}),
        ("processor : 0\nFeatures\t: fp asimd sve\n", {"fp", "asimd", "sve"}),
        ("cpu : POWER9\n", set()),
    ],
    ids=["x86", "arm", "neither"],
)
def test_claims_come_from_cpuinfo(tmp_path: Path, text: str, flags: set[str]) -> None:
    file = tmp_path / "cpuinfo"
    assert claimed_flags(file) == frozenset()
    file.write_text(text)
    assert claimed_flags(file) == flags
