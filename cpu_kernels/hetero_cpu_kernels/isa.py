"""Which instruction sets really execute here.

A processor's flags are a claim: hypervisors hide sets that work and list sets that trap, and users of
other runtimes meet "illegal instruction" on machines that claim AVX-512. So one instruction of each set
is executed in a child process. One child runs them all in order of risk; when it dies, the instruction
it had started is the culprit and a new child goes on behind it. Answers are kept in the process only:
the same container image may start on another processor tomorrow.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hetero_cpu_kernels.instructions import INSTRUCTIONS, Instruction, instruction

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_CHILD = (sys.executable, "-m", "hetero_cpu_kernels.isa_child")
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class InstructionSet:
    """What one instruction set did when it was tried."""

    name: str
    is_claimed: bool
    """The kernel lists it in /proc/cpuinfo."""
    executes: bool
    """One of its instructions ran in a child process and gave the right answer."""
    detail: str
    """Why it does not execute; empty when it does."""


class _ChildRun(NamedTuple):
    """What one child wrote, and how it ended (empty: it finished)."""

    lines: list[str]
    ending: str


@functools.cache
def probe_isa() -> tuple[InstructionSet, ...]:
    """Try every instruction set of this machine; empty on a machine that the table does not know.

    Takes a fifth of a second for each child; at most one child more than there are sets that trap.
    """
    machine = platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    probes = [probe for probe in INSTRUCTIONS if probe.machine == machine]
    answers = run_probes([probe.name for probe in probes], _CHILD)
    flags = claimed_flags(Path("/proc/cpuinfo"))
    return tuple(_judge(probe, answers[probe.name], flags) for probe in probes)


def executes(name: str) -> bool:
    """Whether one instruction set executes here. Raises ValueError for a name that no machine has."""
    wanted = instruction(name).name
    return any(found.name == wanted and found.executes for found in probe_isa())


def claimed_flags(cpuinfo: Path) -> frozenset[str]:
    """Flags that the kernel lists for the first processor (`flags` on x86, `Features` on Arm)."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def run_probes(names: Sequence[str], command: Sequence[str]) -> dict[str, int | str]:
    """Execute the named probes in children started as `command NAMES...`.

    Returns for each name the number that the instruction left, or a sentence why there is none.
    Child's output: see `isa_child`.
    """
    answers: dict[str, int | str] = {}
    while pending := [name for name in names if name not in answers]:
        run = _run_child([*command, *pending])
        started = _read_answers(run.lines, answers)
        if started is not None and started not in answers:
            answers[started] = run.ending or "the probe left no answer"
        elif not any(name in answers for name in pending):
            # The child never reached an instruction: a new one would fare no better.
            answers |= dict.fromkeys(pending, f"not probed: {run.ending or 'the child said nothing'}")
    return answers


def _run_child(command: list[str]) -> _ChildRun:
    # The child finds the packages where this process found them, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired as slow:
        written = slow.stdout or b""
        text = written.decode(errors="replace") if isinstance(written, bytes) else written
        return _ChildRun(text.splitlines(), f"no answer in {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return _ChildRun([], f"no child process could be started ({error})")
    return _ChildRun(done.stdout.splitlines(), _ending(done.returncode, done.stderr))


def _ending(code: int, stderr: str) -> str:
    """How a child ended, in words; empty for a regular end."""
    if code == 0:
        return ""
    if code < 0:
        number = -code
        known = number in {member.value for member in signal.Signals}
        return f"the child was killed by {signal.Signals(number).name if known else f'signal {number}'}"
    last = stderr.strip().splitlines()[-1:] or ["no message"]
    return f"the child ended with code {code}: {last[0]}"


def _read_answers(lines: Sequence[str], answers: dict[str, int | str]) -> str | None:
    """Add the answers in a child's output to `answers`; returns the last name that was started."""
    started = None
    for line in lines:
        word, _, rest = line.partition(" ")
        name, _, value = rest.partition(" ")
        if word == "start":
            started = name
        elif word == "result":
            answers[name] = int(value)
        elif word == "refused":
            answers[name] = value
    return started


def _judge(probe: Instruction, answer: int | str, flags: frozenset[str]) -> InstructionSet:
    is_claimed = set(probe.flags) <= flags
    if answer == probe.expected:
        return InstructionSet(probe.name, is_claimed, True, "")
    wrong = answer if isinstance(answer, str) else f"gave {answer:#x} instead of {probe.expected:#x}"
    return InstructionSet(probe.name, is_claimed, False, wrong)
