"""The kinds of a step add up to its length, and the table of kernel names knows the kernels of the house."""

from __future__ import annotations

import ast
import itertools
import random
from pathlib import Path

import pytest

import hetero_gpu
from bench.step_time import ALL_KINDS, HOST, IDLE, OTHER, StepTime, Work, kind_of

NOT_OF_A_STEP = {"_copy_kernel"}
"""It measures the link."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("up_kernel", "experts"),
        ("_attend_split", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "products"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "small"),
        ("Memcpy HtoD (Pinned -> Device)", "misses"),
        ("Memcpy DtoH (Device -> Pinned)", "small"),
        ("_ensure_kernel", "tables"),
        ("something_new", OTHER),
    ],
)
def test_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def launched_kernels() -> dict[str, str]:
    """Triton kernels of hetero_gpu that host code launches (`kernel[grid](...)`), with their files."""
    kernels = {}
    for path in Path(hetero_gpu.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        jitted = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if name in jitted:
                    kernels[name] = path.name
    return kernels


def test_every_kernel_that_the_house_launches_has_a_kind() -> None:
    kernels = launched_kernels()
    assert {"up_kernel", "down_kernel", "_attend_split", "_ensure_kernel", "_gather_kernel"} <= set(kernels)
    unknown = {name: file for name, file in kernels.items() if kind_of(name) == OTHER}
    assert set(unknown) <= NOT_OF_A_STEP, f"give them a kind in bench/step_time.py: {unknown}"


def test_copies_count_only_where_nothing_computes() -> None:
    works = [
        Work("up_kernel", 0, 10),
        Work("Memcpy HtoD", 5, 25),  # hidden to 10, and from 12 to 20
        Work("_attend_split", 12, 20),
        Work("what_is_this", 30, 34),
        Work("down_kernel", 100, 110),
    ]
    step = StepTime.of(works, num_steps=2)
    assert step.us == dict.fromkeys(ALL_KINDS, 0.0) | {
        "experts": 10.0,
        "attention": 4.0,
        "misses": (2 + 5) / 2,
        "other": 2.0,
        "idle": 2.5,
        "host": 33.0,
    }
    assert step.total_us == 55
    assert step.kernels["experts"] == 1
    assert step.unknown == {"what_is_this": 2.0}


def test_kernel_that_is_launched_early_counts_where_the_one_before_it_ends() -> None:
    works = [Work("_gather_kernel", 0, 400), Work("up_kernel", 3, 414), Work("down_kernel", 410, 420)]
    step = StepTime.of(works, num_steps=1)
    assert (step.us["misses"], step.us["experts"], step.total_us) == (400, 20, 420)


def test_kinds_add_up_whatever_overlaps() -> None:
    draw = random.Random(0)
    names = ("up_kernel", "Memcpy HtoD", "at::native::x", "_gather_kernel", "new")
    for _ in range(200):
        works = [
            Work(draw.choice(names), begin, begin + draw.randrange(0, 12))
            for begin in (draw.randrange(0, 60) for _ in range(draw.randrange(1, 14)))
        ]
        length = max(work.end_us for work in works) - min(work.begin_us for work in works)
        step = StepTime.of(works, num_steps=1)
        assert step.total_us == pytest.approx(length)
        kernels = [work for work in works if not work.name.startswith("Memcpy")]
        busy = itertools.chain.from_iterable(range(int(w.begin_us), int(w.end_us)) for w in kernels)
        without_copies = StepTime.of(kernels, num_steps=1).us if kernels else {}
        assert all(step.us[kind] == without_copies[kind] for kind in ("experts", "small", "other") if kernels)
        assert sum(us for kind, us in without_copies.items() if kind not in (IDLE, HOST)) == len(set(busy))


def test_no_work_is_refused() -> None:
    with pytest.raises(ValueError, match="0 kernels in 16 steps"):
        StepTime.of([], num_steps=16)
