"""kt-kernel's layer against the reference, where it is installed; what it refuses, everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import numpy as np
import pytest

from bench.cpu_expert_records import Bytes, Floats, make_form, random_record, relative_error
from hetero_cpu_kernels.experts import ExpertForm
from hetero_cpu_kernels.experts.reference import expert_reference
from hetero_cpu_kernels.ktransformers import CallMemory, KtLayer, KtPool, check_form, is_installed, load
from hetero_cpu_kernels.ktransformers.layer import to_bfloat16

NUM_EXPERTS, TOP_K, MOST_TOKENS = 8, 3, 40
MOST_ERROR = {"bfloat16": 5e-3, "fp8": 5e-3, "int8": 3e-2, "int4": 2e-2}
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

installed = pytest.mark.skipif(
    not (is_installed() and len(CPUS) > 1),
    reason="kt-kernel, which is never a dependency, is not installed (and needs two processors)",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[KtPool]:
    pool = KtPool(CPUS[:1])
    yield pool
    pool.close()


@installed
@pytest.mark.parametrize("name", MOST_ERROR)
def test_a_layer_is_its_own_copy_and_gives_what_the_reference_does(name: str, pool: KtPool) -> None:
    form, rng = make_form(name, 256, 128), np.random.default_rng(0)
    records = np.stack([random_record(form, rng)[0] for _ in range(NUM_EXPERTS)])
    handed = records.copy()
    layer = KtLayer(pool, form, handed, memory=CallMemory(256, top_k=TOP_K, most_tokens=MOST_TOKENS))
    handed[:] = 0
    for num_tokens in (1, 7, MOST_TOKENS):
        hidden = to_bfloat16(rng.standard_normal((num_tokens, form.hidden)).astype(np.float32))
        experts = rng.random((num_tokens, NUM_EXPERTS)).argsort(axis=1)[:, :TOP_K]
        experts[num_tokens // 2 :, 1] = -1
        weights = rng.uniform(0.1, 1.0, experts.shape).astype(np.float32)
        layer.submit(hidden, experts, weights)
        expected = reference(to_float32(hidden), records, form, experts, weights)
        assert relative_error(to_float32(layer.wait()), expected) < MOST_ERROR[name], num_tokens


@installed
def test_the_spinning_thread_has_no_worker_beside_it(pool: KtPool) -> None:
    assert [os.sched_getaffinity(worker) for worker in pool.worker_ids] == [{CPUS[0]}]
    assert pool.helper_ids
    for helper in pool.helper_ids:
        assert os.sched_getaffinity(helper) == set(CPUS[1:])


@installed
def test_what_it_prints_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    pool = KtPool(CPUS[:1])
    KtLayer(pool, *layer_of("bfloat16"), memory=CallMemory(256, top_k=1, most_tokens=1))
    pool.close()
    said = capfd.readouterr()
    assert said.out == ""
    assert "CPUInfer" in said.err


@pytest.mark.skipif(not CPUS, reason="this system does not bind threads")
def test_without_a_processor_for_its_queue_there_is_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_cpu_kernels.ktransformers.pool.load", object)
    with pytest.raises(ValueError, match=rf"{len(CPUS)} of them leave no processor of this process to it"):
        KtPool(CPUS)


@pytest.mark.skipif(is_installed(), reason="kt-kernel is installed")
def test_where_it_is_missing_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=re.escape("pip install --no-deps kt-kernel==0.7.2 gguf")):
        load()


@pytest.mark.parametrize(
    ("form", "num_experts", "message"),
    [
        (make_form("float16", 256, 128), 8, "no kernels for float16; it has for bfloat16, fp8, int4, int8"),
        (make_form("bfloat16", 256, 40), 8, "multiples of 32, and experts are of 256 and 40 columns"),
        (make_form("int8", 64, 32), 8, "multiples of 64"),
        (make_form("fp8", 384, 128), 8, "float32 scales of 128 x 128 blocks"),
        (make_form("int4", 256, 128), 6, "multiple of 4 experts, and there are 6"),
        (make_form("bfloat16", 256, 128, has_bias=True), 8, "adds no biases"),
        (make_form("bfloat16", 256, 128, gate="gpt_oss"), 8, "silu over halves, not Gate"),
    ],
    ids=["float16", "40 columns", "int8", "cut blocks", "6 experts", "biases", "gate"],
)
def test_what_it_cannot_compute_is_refused(form: ExpertForm, num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_form(form, num_experts)


def test_rounding_to_bfloat16_is_to_the_nearest_and_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -3.14159], dtype=np.float32)
    assert to_float32(to_bfloat16(values)).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.140625]


def layer_of(name: str) -> tuple[ExpertForm, Bytes]:
    form = make_form(name, 256, 128)
    return form, np.stack([random_record(form, np.random.default_rng(0))[0]] * 4)


def to_float32(halves: np.ndarray) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def reference(
    hidden: Floats, records: Bytes, form: ExpertForm, experts: np.ndarray, weights: Floats
) -> Floats:
    out = np.zeros_like(hidden)
    for number, record in enumerate(records):
        tokens, places = np.nonzero(experts == number)
        out[tokens] += weights[tokens, places, None] * expert_reference(hidden[tokens], record, form)
    return out
