"""The random checkpoint is a real one: transformers and the engine read it and agree."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.models.random_bank import random_store
from bench.models.random_checkpoint import (
    INDEX,
    add_geometry,
    ensure_checkpoint,
    geometry_of,
    write_checkpoint,
)
from bench.models.random_geometry import MoonlightGeometry, OlmoeGeometry, RandomGeometry
from hetero_runtime.assembly import assemble
from hetero_runtime.engine import Engine
from hetero_runtime.experts.store import BankStore
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from
from tests.bench.toy_geometry import TINY

SIZES = asdict(TINY)
OTHERS = [
    OlmoeGeometry(**SIZES | {"kv_heads": 4}),
    MoonlightGeometry(**SIZES | {"kv_heads": 4}, shared=2, rotated=8, latent=32, dense=96),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    write_checkpoint(folder, TINY)
    return folder


def test_transformers_loads_every_tensor(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    experts = model.model.layers[1].mlp.experts
    assert experts.gate_up_proj.shape == (8, 2 * 32, 64)
    assert experts.gate_up_proj.float().std().item() == pytest.approx(0.7 / 64**0.5, rel=0.05)
    assert experts.down_proj.float().std().item() == pytest.approx(0.7 / 32**0.5, rel=0.05)
    assert len(experts.down_proj.flatten(1).unique(dim=0)) == 8, "two experts are the same"


@pytest.mark.parametrize("geometry", OTHERS, ids=["olmoe", "moonlight"])
def test_checkpoints_of_other_models(geometry: RandomGeometry, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, geometry)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    check_engine_and_transformers(tmp_path)


def test_what_the_large_ones_take() -> None:
    sizes = {
        type(each).__name__: sum(spec.num_bytes for shard in each.tensors() for spec in shard)
        for each in (OlmoeGeometry(), MoonlightGeometry())
    }
    assert sizes == {"OlmoeGeometry": 13_838_323_712, "MoonlightGeometry": 31_920_220_416}
    assert OlmoeGeometry().expert_bytes == 12_582_912
    assert MoonlightGeometry().expert_bytes == 17_301_504


def test_olmoe_takes_heads_that_fill_the_hidden_size() -> None:
    with pytest.raises(ValueError, match="3 heads of 128: OLMoE's take the hidden size, 2048"):
        OlmoeGeometry(heads=3).config()


def test_engine_and_transformers_write_the_same(folder: Path) -> None:
    check_engine_and_transformers(folder)


def check_engine_and_transformers(folder: Path) -> None:
    prompt = list(range(3, 20))
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with Engine.load(folder, device="cpu", memory={"residency": 0.5}) as engine:
        answer = engine.generate(prompt, max_tokens=12, ignore_eos=True)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()


def test_same_geometry_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_whole_checkpoint_is_kept_and_a_broken_one_written_again(folder: Path, tmp_path: Path) -> None:
    ensure_checkpoint(tmp_path, TINY)
    shard = next(tmp_path.glob("*.safetensors"))
    written = shard.stat().st_mtime_ns
    ensure_checkpoint(tmp_path, TINY)
    assert shard.stat().st_mtime_ns == written
    (tmp_path / INDEX).unlink()  # what a write that was cut short lacks
    ensure_checkpoint(tmp_path, TINY)
    assert shard.stat().st_mtime_ns != written


def test_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocabulary of 100 has no room for 259"):
        write_checkpoint(tmp_path, RandomGeometry(vocab_size=100))


def test_command_line_names_every_size() -> None:
    parser = argparse.ArgumentParser()
    add_geometry(parser)
    geometry = geometry_of(parser.parse_args(["--layers", "3", "--kv-heads", "2"]))
    assert geometry == RandomGeometry(layers=3, kv_heads=2)
    assert RandomGeometry().expert_bytes == 9_437_184


# ---- experts that are made in memory


@pytest.mark.parametrize("geometry", [TINY, *OTHERS], ids=["qwen3", "olmoe", "moonlight"])
@pytest.mark.parametrize("experts", ["checkpoint", "int8"])
def test_a_bank_that_was_never_written_has_the_bytes_of_the_files(
    geometry: RandomGeometry, experts: str, tmp_path: Path
) -> None:
    whole, holes = tmp_path / "whole", tmp_path / "holes"
    num_bytes = write_checkpoint(whole, geometry)
    num_experts_bytes = geometry.layers * geometry.experts * geometry.expert_bytes
    assert write_checkpoint(holes, geometry, has_experts=False) == num_bytes - num_experts_bytes
    for shard in whole.glob("*.safetensors"):
        assert (holes / shard.name).stat().st_size == shard.stat().st_size
    words = {"device": "cpu", "model": {"experts": experts}}
    with Engine.load(whole, **words) as engine:
        read = engine.release()
    assert isinstance(read, BankStore)
    made = random_store(plan_for(config_from(holes, words)).config)
    assert torch.equal(made.records, read.records)
    assert made.errors == read.errors
    read.close()
    parts = assemble(plan_for(config_from(holes, words)).config, store=made)
    with Engine(parts) as ours, Engine.load(whole, **words) as theirs:
        prompt = [5, 6, 7, 8]
        said = [each.generate(prompt, max_tokens=6, ignore_eos=True).token_ids for each in (ours, theirs)]
    assert said[0] == said[1]


def test_a_checkpoint_without_experts_is_not_taken_for_one_with_them(tmp_path: Path) -> None:
    ensure_checkpoint(tmp_path, TINY, has_experts=False)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    ensure_checkpoint(tmp_path, TINY, has_experts=False)
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    ensure_checkpoint(tmp_path, TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.model.layers[0].mlp.experts.down_proj.abs().sum() > 0
