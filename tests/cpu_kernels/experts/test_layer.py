"""A layer's experts against the reference: every format, target, gate and number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cpu_expert_records import FORMATS, make_form, relative_error
from hetero_cpu_kernels.experts import TARGETS, CpuExperts, Target, is_executable
from hetero_cpu_kernels.experts.byte_tiles import multiplies_byte_tiles
from hetero_cpu_kernels.experts.call import Routing
from hetero_cpu_kernels.pool import WorkerPool
from tests.cpu_kernels.experts.cases import Case

MOST_ERROR = {"float32": 2e-6, "pairs": 6e-3, "tiles": 6e-3, "digits": 2e-4}
"""Of the root mean square. bfloat16 keeps 8 bits of weights and activations, digits 16 of the largest."""
SHAPES = {"[256,128]": (256, 128, "silu", False), "[70,34]+bias": (70, 34, "gpt_oss", True)}
COUNTS = [1, 2, 7, 8, 9, 40, 64]
TOKENS = 64


@pytest.fixture(params=TARGETS, ids=lambda entry: entry.name)
def executed(request: pytest.FixtureRequest) -> Target:
    entry: Target = request.param
    if not is_executable(entry):
        pytest.skip(f"{entry.name} does not execute here: compiled only, by test_compile.py")
    return entry


def skip_repeated(entry: Target, name: str) -> None:
    """Skip a format whose code is also another target's."""
    if entry.name in ("avx_vnni", "avx512_vnni") and name not in ("int8", "int4"):
        pytest.skip("the code of avx2 and avx512, which are tested")


def few_error(experts: CpuExperts) -> float:
    """Few tokens are computed in float32, but for weights that the target multiplies as they are."""
    is_in_digits = experts.form.up.encoding in ("int8", "int4") and experts.target.multiplies_bytes
    return MOST_ERROR["digits" if is_in_digits else "float32"]


def many_error(experts: CpuExperts) -> float:
    """Many tokens are computed as the target multiplies; of int8, in digits where it has tiles of bytes."""
    matrices = experts.form.up, experts.form.down
    is_in_digits = all(multiplies_byte_tiles(matrix, experts.target) for matrix in matrices)
    return MOST_ERROR["digits" if is_in_digits else experts.target.many]


def check(case: Case, experts: CpuExperts) -> None:
    error = relative_error(case.run(experts), case.reference)
    assert error < max(few_error(experts), many_error(experts)), f"relative error {error:.1e}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_all_formats(pools: dict[int, WorkerPool], executed: Target, name: str, shape: str) -> None:
    hidden, inner, gate, has_bias = SHAPES[shape]
    if name == "packed" and hidden % 64:
        pytest.skip("packed rows are whole blocks of 64 columns: refused, by test_form.py")
    skip_repeated(executed, name)
    form = make_form(name, hidden, inner, gate=gate, has_bias=has_bias)
    experts = CpuExperts(form, pools[2], target=executed)
    check(Case.make(form, COUNTS, TOKENS), experts)
    few = Case.make(form, [1, 1, 1], 1)
    assert relative_error(few.run(experts), few.reference) < few_error(experts)


@pytest.mark.parametrize("gate", ["clamped", "gpt_oss"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_gates_and_biases_of_bfloat16(
    pools: dict[int, WorkerPool], executed: Target, gate: str, has_bias: bool
) -> None:
    skip_repeated(executed, "bfloat16")
    form = make_form("bfloat16", 96, 48, gate=gate, has_bias=has_bias)
    check(Case.make(form, [3, 17], 20), CpuExperts(form, pools[1], target=executed))


@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 15, 63, 512], ids=lambda n: f"{n}-tokens")
def test_numbers_of_tokens(pools: dict[int, WorkerPool], executed: Target, tokens: int) -> None:
    form = make_form("int8", 64, 48)
    check(Case.make(form, [tokens, tokens], tokens), CpuExperts(form, pools[2], target=executed))


@pytest.mark.parametrize("name", ["packed", "fp4", "fp8", "int8", "int4"])
def test_bits_do_not_depend_on_the_number_of_workers(
    pools: dict[int, WorkerPool], executed: Target, name: str
) -> None:
    skip_repeated(executed, name)
    form = make_form(name, 384, 256, gate="silu")
    case = Case.make(form, [1, 5, 33, 12], 40)
    outs = [case.run(CpuExperts(form, pool, target=executed)) for pool in pools.values()]
    assert all(np.array_equal(out, outs[0]) for out in outs[1:])


def test_bits_do_not_depend_on_what_else_is_called(pools: dict[int, WorkerPool], executed: Target) -> None:
    form = make_form("bfloat16", 64, 32)
    experts = CpuExperts(form, pools[2], target=executed)
    small, large = Case.make(form, [1, 2], 2), Case.make(form, [64, 30], 64)
    first = small.run(experts)
    large.run(experts)
    assert np.array_equal(small.run(experts), first)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_tiles(pools: dict[int, WorkerPool], emulated: Target, name: str, shape: str) -> None:
    hidden, inner, gate, has_bias = SHAPES[shape]
    if name == "packed" and hidden % 64:
        pytest.skip("packed rows are whole blocks of 64 columns: refused, by test_form.py")
    form = make_form(name, hidden, inner, gate=gate, has_bias=has_bias)
    case = Case.make(form, [9, 40, 1, 33, 3], 40)
    check(case, CpuExperts(form, pools[2], target=emulated))


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_bits_of_tiles_do_not_depend_on_the_number_of_workers(
    pools: dict[int, WorkerPool], emulated: Target, name: str
) -> None:
    form = make_form(name, 64, 96)
    case = Case.make(form, [3, 17, 1, 20, 2, 33, 5], 40)
    outs = [case.run(CpuExperts(form, pool, target=emulated)) for pool in pools.values()]
    assert relative_error(outs[0], case.reference) < MOST_ERROR["tiles"]
    assert all(np.array_equal(out, outs[0]) for out in outs[1:])


def test_what_does_not_fit_is_refused(pools: dict[int, WorkerPool]) -> None:
    form = make_form("bfloat16", 64, 32)
    case = Case.make(form, [1, 2], 3)
    experts = CpuExperts(form, pools[1])
    routing = case.routing

    def run(**changes: object) -> None:
        arrays = {"hidden": case.hidden, "bank": case.bank, "routing": routing, "out": case.hidden.copy()}
        arrays |= changes
        experts.run(arrays.pop("hidden"), arrays.pop("bank"), **arrays)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="hidden is float64"):
        run(hidden=case.hidden.astype(np.float64))
    with pytest.raises(ValueError, match="not C-contiguous"):
        run(hidden=np.asfortranarray(case.hidden))
    with pytest.raises(ValueError, match="out 2"):
        run(out=case.hidden[:2].copy())
    with pytest.raises(ValueError, match="outside of the bank"):
        run(routing=routing._replace(offsets=routing.offsets + 4096))
    with pytest.raises(ValueError, match="rows outside of the 3"):
        run(routing=routing._replace(tokens=routing.tokens + 3))
    with pytest.raises(ValueError, match="has 0 tokens"):
        run(routing=routing._replace(bounds=np.array([0, 0, 3])))
    with pytest.raises(ValueError, match=r"routing\.weights is float64"):
        run(routing=routing._replace(weights=routing.weights.astype(np.float64)))


def test_no_experts_give_zeros(pools: dict[int, WorkerPool]) -> None:
    form = make_form("bfloat16", 64, 32)
    none = Routing(*(np.zeros(n, np.int64) for n in (0, 1, 0)), np.zeros(0, np.float32))
    out = np.full((2, 64), np.nan, np.float32)
    CpuExperts(form, pools[2]).run(np.ones_like(out), np.zeros(64, np.uint8), routing=none, out=out)
    assert not out.any()
