"""What each check concludes from facts that a test makes up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_cpu_kernels.experts import target
from hetero_cpu_kernels.isa import InstructionSet
from hetero_cpu_kernels.topology import Node, Topology
from hetero_gpu.link import LinkFacts
from hetero_runtime.doctor import cores, dram, experts, gpu, isa, link
from hetero_runtime.doctor.base import Finding, expert_ms, num_experts


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def test_an_expert_over_a_link() -> None:
    assert expert_ms(49.2) == pytest.approx(0.19, abs=0.005)
    assert num_experts(10 * 9_437_184 + 1) == 10


def test_link_rates_become_milliseconds_an_expert() -> None:
    facts = LinkFacts(pinned=50.0, pageable=12.5, zero_copy=44.0, device_copy=4300.0, registration=20.0)
    found = by_name(link.judge(facts))
    assert found["link, pinned"].meaning == "an expert of 9.4 MB takes 0.19 ms over this link"
    assert "0.75 ms" in found["link, pageable"].meaning
    assert "4.0 times as long" in found["link, pageable"].meaning
    assert "fetches an expert of 9.4 MB by itself in 0.21 ms" in found["link, zero-copy"].meaning
    assert "2.2 µs" in found["device memory"].meaning
    assert "60 GB with CUDA adds 3.0 s" in found["registration"].meaning
    assert {one.status for one in found.values()} == {"ok"}


def test_a_narrow_link_and_a_refused_registration_warn() -> None:
    (narrow,) = link.judge(LinkFacts(pinned=3.0))
    assert narrow.status == "warn"
    assert "check the slot" in narrow.meaning
    pageable, refusal = link.judge(LinkFacts(pageable=6.0, refusals=("a pin quota of 1 GiB",)))
    assert (pageable.status, refusal.status) == ("warn", "warn")
    assert refusal.meaning.startswith("a pin quota of 1 GiB")


def test_no_device_is_absent_and_a_driver_without_cuda_in_torch_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (absent,) = link.check(tmp_path)
    assert (absent.status, absent.value) == ("absent", None)
    assert gpu._no_device(tmp_path / "version").status == "absent"
    (tmp_path / "version").write_text("NVRM version")
    warned = gpu._no_device(tmp_path / "version")
    assert warned.status == "warn"
    assert "is built without CUDA: install a torch that fits" in warned.meaning


@pytest.mark.gpu
def test_devices_are_found(tmp_path: Path) -> None:
    found = by_name(gpu.check(tmp_path))
    assert found["gpu 0"].value == torch.cuda.get_device_name(0)
    assert "slabs of 9.4 MB" in found["gpu 0 free memory"].meaning


def test_instruction_sets() -> None:
    found = by_name(
        isa.judge(
            [
                InstructionSet("avx2", True, True, ""),
                InstructionSet("avx512_bf16", False, True, ""),
                InstructionSet("amx_bf16", True, False, "the child was killed by SIGILL"),
                InstructionSet("sve", False, False, "the child was killed by SIGILL"),
            ],
            "x86_64",
        )
    )
    assert [one.status for one in found.values()] == ["ok", "ok", "warn", "absent"]
    assert "not listed in /proc/cpuinfo" in found["ISA avx512_bf16"].meaning
    assert found["ISA amx_bf16"].meaning == (
        "claimed by /proc/cpuinfo but does not execute here (the child was killed by SIGILL): "
        "prefill of CPU experts falls back to AVX-512 or AVX2"
    )


def test_an_unknown_machine_has_one_line() -> None:
    (finding,) = isa.judge([], "riscv64")
    assert (finding.status, finding.value) == ("absent", "riscv64")


SMT_PAIR = Topology(
    cores=((0, 4), (1, 5)), nodes=(Node(0, (0, 1, 4, 5)),), quota=1.5, online=8, cache_bytes=1 << 25
)


def test_cores_affinity_and_quota() -> None:
    found = by_name(cores.judge(SMT_PAIR))
    assert "starts 1 threads, one a physical core; the 2 SMT siblings" in found["physical cores"].meaning
    assert "may use 4 of 8" in found["affinity"].meaning
    assert "more than 1 threads would be stopped" in found["CPU quota"].meaning
    assert found["NUMA nodes"].status == "ok"


def test_two_nodes_are_measured_and_warned_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    topology = Topology(((0,), (1,)), (Node(0, (0,)), Node(1, (1,))), None, 2, 0)
    (nodes,) = [one for one in cores.judge(topology) if one.name == "NUMA nodes"]
    assert nodes.status == "warn"
    assert "numactl --cpunodebind=N --membind=N" in nodes.meaning
    asked: list[tuple[int, tuple[int, ...] | None]] = []

    def measured(threads: int, *, cpus: tuple[int, ...] | None = None) -> float:
        asked.append((threads, cpus))
        return 20.0

    monkeypatch.setattr(dram, "this_machine", lambda: topology)
    monkeypatch.setattr(dram, "dram_read_gb_s", measured)
    names = [one.name for one in dram.check(tmp_path)]
    assert names == ["DRAM read, 2 threads", "DRAM read, node 0", "DRAM read, node 1"]
    assert asked == [(2, None), (1, (0,)), (1, (1,))]


def test_who_computes_experts_on_the_cpu() -> None:
    four = Topology(((0,), (1,), (2,), (3,)), (Node(0, (0, 1, 2, 3)),), None, 4, 0)
    (found,) = experts.judge((target("avx2"), target("avx512"), target("amx")), four)
    assert (found.value, found.status) == ("amx", "ok")
    assert "3 workers on processors 1, 2, 3; one core is left for the engine; models that" in found.meaning
    assert found.meaning.endswith("compute with avx512")
    (alone,) = experts.judge((target("avx2"),), Topology(((0,),), (Node(0, (0,)),), None, 1, 0))
    assert alone.meaning.endswith("starts 1 worker on processor 0")
    (absent,) = experts.judge((), four)
    assert absent.status == "absent"
