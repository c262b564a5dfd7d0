"""A packed bank changes nothing that is said: tokens and eager logits equal the plain bank's in every bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_gpu import host_memory
from hetero_gpu.host_memory import Registration
from hetero_runtime.engine import Engine
from hetero_runtime.errors import DeviceError
from hetero_runtime.experts import packing
from hetero_runtime.plan import read_geometry
from tests.architectures import prompt_ids
from tests.packable_checkpoints import PACKABLE, build_packable
from tests.runtime.engine.rest import Banks, assert_at_rest

pytestmark = pytest.mark.gpu

PROMPT = prompt_ids(17)[0].tolist()
NUM_TOKENS = 40
SAMPLED: dict[str, Any] = {"temperature": 1.3, "seed": 7}


@pytest.fixture(scope="module", params=PACKABLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_packable(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, mode: str, *, packed: bool, **memory: Any) -> Engine:
    return Engine.load(
        folder,
        device="cuda",
        memory={"packed": packed, **memory},
        execution={"mode": mode, "max_rows": 1, "max_length": 128},
    )


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Greedy and sampled; a cold prompt, then a warm one."""
    return [
        engine.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, **options).token_ids
        for options in ({}, SAMPLED)
    ]


def memory_of(residency: str, folder: Path) -> dict[str, Any]:
    """The smallest legal number of slabs, a quarter of the experts, all of them, or one layer pinned."""
    if residency == "smallest":
        return {"slabs": read_geometry(folder).top_k}
    if residency == "pinned":
        return {"residency": 0.4, "pinned_prefix": 1}
    return {"residency": 0.25} if residency == "25%" else {"slabs": "all"}


@pytest.mark.parametrize("residency", ["smallest", "25%", "all", "pinned"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_same_text_from_fewer_bytes(
    mode: str, residency: str, folder: Path, logits: list[torch.Tensor]
) -> None:
    memory = memory_of(residency, folder)
    with load(folder, mode, packed=False, **memory) as engine:
        assert engine._parts.store.packing is None
        expected, plain = answers(engine), engine.stats()
    expected_logits = [each.clone() for each in logits]
    logits.clear()
    with load(folder, mode, packed=True, **memory) as engine:
        packing = engine._parts.store.packing
        assert packing is not None
        assert answers(engine) == expected
        engine.check()
        stats = engine.stats()
        assert sum(stats.slots) == engine._parts.slabs.num_slabs
    if mode == "eager":
        assert all(torch.equal(a, b) for a, b in zip(logits, expected_logits, strict=True))
    assert stats.bank_bytes / plain.bank_bytes == packing.packed_bytes / packing.plain_bytes
    assert stats.decode.cache.required == plain.decode.cache.required
    assert stats.decode.cache.bytes_moved <= plain.decode.cache.bytes_moved
    if mode == "eager":
        loads = stats.prefill.cache.loads + stats.decode.cache.loads
        moved = stats.prefill.cache.bytes_moved + stats.decode.cache.bytes_moved
        assert moved == loads * packing.packed_bytes


@pytest.mark.parametrize("kind", ["staging", "none"])
def test_a_packed_bank_that_cuda_does_not_register(
    kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, "eager", packed=False, residency=0.25) as engine:
        expected = answers(engine)
    monkeypatch.setattr(host_memory, "register", lambda *_, **__: Registration(kind, "a test refuses it"))
    with load(folder, "eager", packed=True, residency=0.25) as engine:
        assert answers(engine) == expected
        assert_at_rest(engine)


@pytest.mark.usefixtures("warm_cuda")
def test_close_gives_the_memory_of_copies_back(folder: Path) -> None:
    gc.collect()
    allocated = torch.cuda.memory_allocated()
    engine = load(folder, "eager", packed=True, residency=0.25)
    answers(engine)
    engine.close()
    assert torch.cuda.memory_allocated() <= allocated


@pytest.fixture
def warm_cuda(folder: Path) -> None:
    """What CUDA opens once for the process is open before `banks` counts."""
    load(folder, "eager", packed=True, slabs="all").close()


@pytest.mark.usefixtures("warm_cuda")
def test_packing_that_fails_leaves_nothing(
    folder: Path, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> bool:
        raise MemoryError("no scratch")

    monkeypatch.setattr(packing, "_pack_in_waves", failing)
    with pytest.raises(DeviceError, match=r"no room for packing the experts \(no scratch\); .*packed: false"):
        load(folder, "eager", packed=True, residency=0.25)
    assert banks.num_made == 1
