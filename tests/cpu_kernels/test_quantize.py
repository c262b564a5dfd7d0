"""What quantisers write, read back by the reference of the kernels that compute with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hetero_cpu_kernels.experts.form import Matrix, Scales
from hetero_cpu_kernels.experts.reference import dequantize
from hetero_cpu_kernels.quantize import QuantizedError, quantize

Floats = npt.NDArray[np.float32]
ENCODINGS = ("int8", "int4", "fp8")
SHAPES = [(1, 2), (3, 40), (63, 34), (130, 258), (256, 96)]
MOST = {"int8": 0.012, "int4": 0.11, "fp8": 0.03}
"""Relative root mean square error for weights of a normal distribution."""


def quantized(
    weights: npt.NDArray[Any], encoding: str
) -> tuple[Floats, npt.NDArray[np.uint8], QuantizedError]:
    """Weights as they are read back, the values written, and the error told."""
    rows, cols = weights.shape
    values = np.full((rows, cols // 2 if encoding == "int4" else cols), 0xEE, dtype=np.uint8)
    scales: npt.NDArray[Any] = {
        "int8": np.full(rows, np.nan, np.float32),
        "int4": np.full((rows, -(-cols // 32)), 0x7FFF, np.uint16),
        "fp8": np.full((-(-rows // 128), -(-cols // 128)), np.nan, np.float32),
    }[encoding]
    error = quantize(weights, encoding, values=values, scales=scales)  # type: ignore[arg-type]
    offset = -(-values.size // 128) * 128
    record = np.zeros(offset + scales.nbytes, np.uint8)
    record[: values.size], record[offset:] = values.reshape(-1), scales.view(np.uint8).reshape(-1)
    described = {
        "int8": Scales(offset, "float32", 1, cols),
        "int4": Scales(offset, "bfloat16", 1, 32),
        "fp8": Scales(offset, "float32", 128, 128),
    }[encoding]
    return dequantize(record, Matrix(0, encoding, rows, cols, described)), values, error  # type: ignore[arg-type]


def random_weights(rows: int, cols: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * np.float32(0.02)


def largest(weights: Floats, rows: int, cols: int) -> Floats:
    """The largest magnitude of each one's block of `rows` × `cols`."""
    out = np.empty_like(weights)
    for r in range(0, weights.shape[0], rows):
        for c in range(0, weights.shape[1], cols):
            block = np.abs(weights[r : r + rows, c : c + cols])
            out[r : r + rows, c : c + cols] = block.max()
    return out


def bound(weights: Floats, encoding: str) -> Floats:
    """The most by which each weight may be off."""
    if encoding == "int8":
        return largest(weights, 1, weights.shape[1]) / 254
    if encoding == "int4":  # of the finer of two scales, one step; bfloat16 rounds scales by up to 1/256
        return largest(weights, 1, 32) / 8 * np.float32(1 + 1 / 256)
    return np.maximum(np.abs(weights) / 16, largest(weights, 128, 128) / 448 * np.float32(2.0**-10))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_come_back_within_the_bound_of_the_encoding(encoding: str, shape: tuple[int, int]) -> None:
    weights = random_weights(*shape)
    read, _, error = quantized(weights, encoding)
    assert (np.abs(read - weights) <= bound(weights, encoding) * np.float32(1.0001)).all()
    squared = np.square((read - weights).astype(np.float64)).sum()
    assert error.squared_error == pytest.approx(squared, rel=1e-3, abs=1e-12)
    assert error.squared_weight == pytest.approx(np.square(weights.astype(np.float64)).sum(), rel=1e-5)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_error_of_normal_weights_is_small(encoding: str) -> None:
    _, _, error = quantized(random_weights(256, 512), encoding)
    assert 0.1 * MOST[encoding] < (error.squared_error / error.squared_weight) ** 0.5 < MOST[encoding]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bfloat16_and_float32_of_the_same_values_give_the_same(encoding: str) -> None:
    rounded = torch.from_numpy(random_weights(40, 66)).bfloat16()
    bits = rounded.view(torch.uint16).numpy()
    from_bits, from_floats = quantized(bits, encoding), quantized(rounded.float().numpy(), encoding)
    assert np.array_equal(from_bits[1], from_floats[1]) and np.array_equal(from_bits[0], from_floats[0])
    assert from_bits[2] == from_floats[2]


def test_fp8_is_rounded_as_torch_rounds_it() -> None:
    """The first row holds every midpoint between two values, and what lies closest to it on both sides."""
    steps = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (steps[1:] + steps[:-1]) / 2
    around = torch.cat(
        [middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, middle + 1)]
    )
    row = torch.cat([around, -around, torch.zeros(128 * 6 - 2 * len(around))])
    weights = torch.cat([row[None], torch.full((1, len(row)), 448.0)]).numpy()  # the second: scales are 1
    _, values, _ = quantized(weights, "fp8")
    expected = torch.from_numpy(weights).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_zeros_and_tiny_weights_come_back_as_zeros(encoding: str) -> None:
    weights = np.zeros((4, 64), np.float32)
    weights[1:3] = 1e-38
    weights[3, ::2] = -1e-40
    read, _, error = quantized(weights, encoding)
    assert np.abs(read).max() <= 1e-38
    assert np.isfinite(error).all()


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_of_any_size_keep_their_relative_error(encoding: str, size: float) -> None:
    weights = random_weights(16, 64)
    small = np.linalg.norm(quantized(weights * np.float32(size), encoding)[0] / size - weights)
    assert small == pytest.approx(np.linalg.norm(quantized(weights, encoding)[0] - weights), rel=0.02)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_weight_that_is_no_number_is_refused(encoding: str, value: float) -> None:
    weights = random_weights(5, 66)
    weights[3, 65] = value
    with pytest.raises(ValueError, match="a weight is infinite or not a number"):
        quantized(weights, encoding)


def test_int4_takes_the_better_of_two_scales() -> None:
    weights = random_weights(64, 128, seed=3)
    read, _, _ = quantized(weights, "int4")
    groups, found = weights.reshape(-1, 32), read.reshape(-1, 32)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    for scale in (extreme / -8, np.abs(extreme) / 7):
        rounded = torch.from_numpy(scale).bfloat16().float().numpy()
        tried = np.clip(np.floor(groups / rounded + 0.5), -8, 7) * rounded
        assert (np.square(found - groups).sum(1) <= np.square(tried - groups).sum(1) * 1.0001).all()
