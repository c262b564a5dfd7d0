"""The decode kernel against the reference: chunks with tails, escapes at their borders, special values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.decode import decode
from hetero_gpu.packed.layout import CHUNK_ELEMENTS
from hetero_gpu.packed.reference import pack_reference
from tests.gpu.low_memory import low_memory
from tests.gpu.packed.records import SIZES, as_bytes, weights


def assert_decodes(elements: np.ndarray, device: torch.device) -> None:
    layout, plain = PackedLayout(len(elements)), as_bytes(elements)
    packed = pack_reference(plain, layout)
    assert packed is not None
    room = torch.full((layout.plain_bytes + 64,), 0xA5, dtype=torch.uint8, device=device)
    decode(torch.from_numpy(packed).to(device), room[: layout.plain_bytes], layout)
    assert np.array_equal(room[: layout.plain_bytes].cpu().numpy(), plain)
    assert bool((room[layout.plain_bytes :] == 0xA5).all())


@pytest.mark.parametrize("num_elements", SIZES, ids=lambda n: f"elements{n}")
def test_decode_equals_reference(device: torch.device, num_elements: int) -> None:
    assert_decodes(weights(num_elements), device)


@pytest.mark.parametrize("length", [511, 512, 513, 700], ids=lambda n: f"escapes{n}")
def test_runs_of_escapes(device: torch.device, length: int) -> None:
    """More than one block of them in a chunk, and across the border to the next."""
    elements = weights(2 * CHUNK_ELEMENTS, seed=2)
    elements[100 : 100 + length] = 0x7F80
    elements[CHUNK_ELEMENTS - 5 : CHUNK_ELEMENTS + 5] = 0x7F80
    assert_decodes(elements, device)


def test_any_bits(device: torch.device) -> None:
    """Small enough that even noise fits into the page."""
    assert_decodes(np.random.default_rng(3).integers(0, 1 << 16, 512).astype(np.uint16), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
def test_a_record_below_2_gib() -> None:
    layout, plain = PackedLayout(2048), as_bytes(weights(2048))
    packed = pack_reference(plain, layout)
    assert packed is not None
    memory = low_memory(layout.packed_bytes + layout.plain_bytes)
    memory[: layout.packed_bytes] = torch.from_numpy(packed)
    slab = memory[layout.packed_bytes :]
    decode(memory[: layout.packed_bytes], slab, layout)
    assert np.array_equal(slab.numpy(), plain)


def test_sizes_must_agree(device: torch.device) -> None:
    layout = PackedLayout(2048)
    packed = torch.zeros(layout.packed_bytes, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"decoded to 4095: the layout has 4096 and 4096"):
        decode(packed, torch.zeros(4095, dtype=torch.uint8, device=device), layout)
