"""A checkpoint of a large model's geometry with random weights, written as fast as the disk takes it.

What it is for: bytes, reads, copies and kernels are those of the real model; text and routing are not (the
benches replay recorded routing). One shard a layer, one tensor an expert and projection, as on the Hub.

    pool   32 MiB of normal numbers for each standard deviation, made once
    tensor a window of its pool that begins anywhere: no two hold the same numbers in the same place

Where engines share one bank of experts, these need not be written: `random_bank.py` makes the same ones in
memory, and the files have holes in their place.

`python -m bench.models.random_checkpoint FOLDER --layers 16`
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.models.random_geometry import ITEMSIZE, RandomGeometry, Spec

POOL_ELEMENTS = 16 << 20
WRITERS = 8
INDEX = "model.safetensors.index.json"
LEFT_OUT = "routed_experts_left_out"
"""The key of config.json that says so."""
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>")


def write_checkpoint(folder: Path, geometry: RandomGeometry, *, has_experts: bool = True) -> int:
    """Write config, tokenizer and weights, flushed to the disk; the index comes last, as the mark of a whole
    checkpoint. Returns the bytes of the tensors that are written. The same geometry gives the same bytes.

    `has_experts`: whether routed experts are written; otherwise config.json says that they are not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)
    _write_json(folder / "config.json", _config(geometry, has_experts=has_experts))
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write_tokenizer(folder, geometry.vocab_size)
    shards = _shards(geometry)
    for std in {spec.std for specs in shards.values() for spec in specs}:
        _pool(std)  # before the writers share it
    with ThreadPoolExecutor(min(WRITERS, os.cpu_count() or 1)) as pool:
        written = pool.map(
            lambda name: _write_shard(folder / name, shards[name], has_experts=has_experts), shards
        )
        num_bytes = sum(written)
    weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
    total_size = sum(spec.num_bytes for specs in shards.values() for spec in specs)
    _write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    return num_bytes


def ensure_checkpoint(folder: Path, geometry: RandomGeometry, *, has_experts: bool = True) -> Path:
    """`folder`, written now unless such a checkpoint is there already, with or without experts."""
    config, expected = folder / "config.json", _config(geometry, has_experts=has_experts)
    if (folder / INDEX).is_file() and json.loads(config.read_text(encoding="utf-8")) == expected:
        return folder
    began = time.perf_counter()
    num_bytes = write_checkpoint(folder, geometry, has_experts=has_experts)
    print(f"wrote {num_bytes / 1e9:.1f} GB to {folder} in {time.perf_counter() - began:.0f} s", flush=True)
    return folder


def _config(geometry: RandomGeometry, *, has_experts: bool) -> dict[str, Any]:
    return geometry.config() | ({} if has_experts else {LEFT_OUT: True})


def _shards(geometry: RandomGeometry) -> dict[str, list[Spec]]:
    groups = geometry.tensors()
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": specs for i, specs in enumerate(groups)}


def _write_shard(path: Path, specs: list[Spec], *, has_experts: bool) -> int:
    """Returns the bytes of the tensors that were written; what is left out is a hole in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        ends = [offset, offset + spec.num_bytes]
        header[spec.name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": ends}
        offset += spec.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    num_bytes = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            if spec.is_routed_expert and not has_experts:
                file.seek(spec.num_bytes, os.SEEK_CUR)
                continue
            num_bytes += sum(file.write(window) for window in numbers_of(spec))
        file.truncate(8 + len(text) + offset)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes


def numbers_of(spec: Spec) -> Iterator[memoryview]:
    """The bytes of one tensor: windows of its pool until it is full."""
    pool, left = _pool(spec.std), spec.num_bytes
    draw = random.Random(spec.name)
    while left:
        num_bytes = min(left, len(pool) // 2)
        begin = ITEMSIZE * draw.randrange((len(pool) - num_bytes) // ITEMSIZE + 1)
        yield pool[begin : begin + num_bytes]
        left -= num_bytes


@cache
def _pool(std: float | None) -> memoryview:
    """Bytes of bf16 numbers: the same at every call."""
    if std is None:
        numbers = torch.ones(POOL_ELEMENTS // 1024, dtype=torch.bfloat16)
    else:
        generator = torch.Generator().manual_seed(0)
        numbers = (torch.randn(POOL_ELEMENTS, generator=generator) * std).to(torch.bfloat16)
    return numbers.view(torch.uint8).numpy().data


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges, filled up with names that no text contains."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise ValueError(
            f"a vocabulary of {vocab_size} has no room for {len(tokens)} bytes and special tokens"
        )
    tokens += [f"<|unused {i}|>" for i in range(vocab_size - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, begin, end = SPECIAL_TOKENS
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "bos_token": begin}
    _write_json(folder / "tokenizer_config.json", {**settings, "eos_token": end})


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoint that the command line describes, unless it is there."""
    parser = argparse.ArgumentParser(description="Write a random checkpoint of Qwen3-30B-A3B geometry.")
    parser.add_argument("folder", type=Path)
    add_geometry(parser)
    arguments = parser.parse_args()
    ensure_checkpoint(arguments.folder, geometry_of(arguments))


def add_geometry(parser: argparse.ArgumentParser) -> None:
    """An option for each size of the geometry: `--layers`, `--hidden`, ..."""
    for name, default in asdict(RandomGeometry()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")


def geometry_of(arguments: argparse.Namespace) -> RandomGeometry:
    """The geometry that those options say."""
    return RandomGeometry(**{name: getattr(arguments, name) for name in asdict(RandomGeometry())})


if __name__ == "__main__":
    main()
