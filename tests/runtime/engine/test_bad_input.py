"""What a user can get wrong: one error of the right class that names what is wrong and what to do.

Faults of a folder or a configuration are found before any memory for experts is taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hetero_runtime.engine import Engine
from hetero_runtime.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    HeteroError,
    RequestError,
)
from hetero_runtime.generation import CancelToken, SamplingParams
from hetero_runtime.hf.architectures import COVERED
from hetero_runtime.hf.images import GridProcessor
from tests import tiny_tokenizer
from tests.architectures import prompt_ids
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import Banks, assert_at_rest

MODEL = "Qwen2Moe"  # one shard
SHARDED = "Qwen3Moe"

pytestmark = pytest.mark.usefixtures("banks")

Change = Callable[[Path], None]


@pytest.fixture
def folder(checkpoint: MakeCheckpoint, tmp_path: Path) -> Callable[[str], Path]:
    """`folder(name)`: a copy of a tiny checkpoint, to be spoiled."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def load(source: Any, **overrides: Any) -> Engine:
    return Engine.load(source, device="cpu", **overrides)


# ---- the folder of a model


def edit_config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def edit_tensors(change_one: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Change:
    """Change the tensors of the only shard; None drops one."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        changed = {name: change_one(name, tensor) for name, tensor in load_file(file).items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)

    return change


def remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text) and None


def cut(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 100)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def dense(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("num_experts", "num_local_experts"):
        config.pop(key, None)
    file.write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"

SPOILT_FOLDERS: dict[str, tuple[Change, str]] = {
    "no config": (
        remove("config.json"),
        r"config.json: cannot be read \(No such file.*is this a model folder",
    ),
    "config is no JSON": (write("config.json", "{"), r"config.json: is not JSON .*download it again"),
    "pickle": (only_pickle, r"holds no \*.safetensors file; only safetensors is read \(never pickle\)"),
    "truncated shard": (cut, r"model.safetensors: truncated: '.*' ends at byte \d+ of a file of \d+ bytes"),
    "unknown architecture": (
        edit_config(architectures=["FooForCausalLM"]),
        rf"architecture FooForCausalLM is not covered .*\. Covered: {', '.join(sorted(COVERED))}",
    ),
    "no architecture": (edit_config(architectures=None), r"architecture none \(config.json has no `archi"),
    "unknown model type": (
        edit_config(model_type="foo"),
        r"transformers 5\.[\d.]+ does not understand it .*foo",
    ),
    "no experts in the config": (
        dense,
        r"without routed experts .*a dense one runs in transformers as it is",
    ),
    "more experts in the config": (
        edit_config(num_experts=32, num_local_experts=32),
        r"layer 0 has 16 of the 32 experts that config.json names; a shard is missing",
    ),
    "quantisation": (
        edit_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"quantization 'gptq' is not covered by this version\. Covered: none .*fp8 \(block-wise\), mxfp4",
    ),
    "an expert of another dtype": (
        edit_tensors(lambda name, tensor: tensor.double() if name == EXPERT else tensor),
        r"expert 0 of layer 0 takes \d+ bytes, expert 3 of layer 0 \d+; experts .* must all be alike",
    ),
    "experts of a dtype nobody knows": (
        edit_tensors(lambda name, tensor: tensor.int() if ".experts." in name else tensor),
        r"gate_up_proj: .* are I32; expected one of F32, F16, BF16",
    ),
    "an expert is missing": (
        edit_tensors(lambda name, tensor: None if ".experts.3." in name else tensor),
        r"layer 0 has 15 of the 16 experts that config.json names; a shard is missing",
    ),
    "a weight of the backbone is missing": (
        edit_tensors(lambda name, tensor: None if name == "model.norm.weight" else tensor),
        r"1 tensors that the model needs are not in the checkpoint, first model.norm.weight",
    ),
    "another vocabulary in the config": (
        edit_config(vocab_size=77),
        r"config.json says another shape .* for 2 tensors, first lm_head.weight: \[77, \d+\] by config.json",
    ),
    "wider experts in the config": (
        edit_config(moe_intermediate_size=999),
        r"of \[1998, 64\] there, the checkpoint",
    ),
    "no experts at all": (edit_config(num_experts=0, num_local_experts=0), r"num_experts"),
    "experts that are no number": (edit_config(num_experts="many", num_local_experts="many"), r"num_experts"),
    "more chosen than there are": (edit_config(num_experts_per_tok=99), r"99"),
    "no tokenizer": (
        remove("tokenizer.json", "tokenizer_config.json"),
        r"holds no tokenizer.*Copy tokenizer.json and tokenizer_config.json from where the model came from",
    ),
    "half a tokenizer": (remove("tokenizer.json"), r"the tokenizer cannot be read .*Copy tokenizer.json"),
    "tokenizer is no JSON": (
        write("tokenizer.json", "{"),
        r"the tokenizer cannot be read .*Copy tokenizer.json",
    ),
    "generation config is no JSON": (
        write("generation_config.json", "{"),
        r"generation_config.json: cannot be read .*download it again, or remove it",
    ),
    "generation config is no object": (write("generation_config.json", "[]"), r"is not a JSON object"),
}


@pytest.mark.parametrize("case", SPOILT_FOLDERS)
def test_a_spoilt_folder(case: str, folder: Callable[[str], Path], banks: Banks) -> None:
    change, message = SPOILT_FOLDERS[case]
    path = folder(MODEL)
    change(path)
    with pytest.raises(CheckpointError, match=message):
        load(path)
    assert banks.num_made == 0, "memory was taken before the fault was found"


def test_a_missing_shard(folder: Callable[[str], Path], banks: Banks) -> None:
    path = folder(SHARDED)
    (path / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 6 shards .* missing: model-00002-of-00006.safetensors"):
        load(path)
    assert banks.num_made == 0


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"/no/where: no such file or folder; give a YAML file, or the folder"
    ):
        load("/no/where")
    with pytest.raises(CheckpointError, match=r"/no/where: no such folder; model.path must name"):
        load({"model": {"path": "/no/where"}})


# ---- configuration

BAD_SETTINGS: dict[str, tuple[type[HeteroError], dict[str, Any], str]] = {
    "typo": (ConfigError, {"memory": {"slab": 4}}, r"memory.slab: unknown key; did you mean memory.slabs\?"),
    "no such section": (ConfigError, {"memori": {"slabs": 4}}, r"memori: unknown key; did you mean memory\?"),
    "not in this version": (
        ConfigError,
        {"execution": {"compile": True}},
        r"execution.compile: true is not in",
    ),
    "wrong type": (
        ConfigError,
        {"memory": {"slabs": "many"}},
        r"memory.slabs: 'many' is not allowed; al",
    ),
    "no value at all": (
        ConfigError,
        {"memory": {"slabs": object()}},
        r"memory.slabs: <object .* is not",
    ),
    "two that say the same": (
        ConfigError,
        {"memory": {"slabs": 8, "residency": 0.5}},
        r"memory.slabs=8 and memory.residency=0.5 are both given; .* keep one",
    ),
    "context": (
        ConfigError,
        {"execution": {"max_length": 1000}},
        r"max_length=1000 is over .*; write 256",
    ),
    "below top-k": (
        BudgetError,
        {"memory": {"slabs": 3}},
        r"slabs=3 is too few: .* is 4, a token needs 4",
    ),
    "far below top-k": (
        BudgetError,
        {"memory": {"residency": 0.00001}},
        r"memory.residency=1e-05 is 0 slabs; the smallest legal residency is 0.125 \(4 slabs\)",
    ),
    "no budget": (BudgetError, {"memory": {"gpu": "4KiB"}}, r"does not fit.*What fits: memory.gpu=\d+MiB"),
    "no budget on the host": (
        BudgetError,
        {"memory": {"host": "4KiB"}},
        r"does not fit.*fits: memory.host=",
    ),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case: str, checkpoint: MakeCheckpoint, banks: Banks) -> None:
    kind, overrides, message = BAD_SETTINGS[case]
    with pytest.raises(kind, match=message):
        load(checkpoint(MODEL), **overrides)
    assert banks.num_made == 0


def test_a_typo_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory: {slabz: 4}\n")
    with pytest.raises(
        ConfigError, match=r"mine.yaml: memory.slabz: unknown key; did you mean memory.slabs\?"
    ):
        load(file)


def test_paths_are_taken_as_they_come(checkpoint: MakeCheckpoint) -> None:
    path = checkpoint(MODEL)
    for source, overrides in ((path, {}), ({"model": {"path": path}}, {}), (None, {"model": {"path": path}})):
        with load(source, memory={"slabs": 4}, **overrides) as engine:
            assert (engine.config.model.path, engine.config.memory.slabs) == (path, 4)


# ---- requests


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def about(image: Any) -> list[dict[str, Any]]:
    return chat([{"type": "text", "text": "what is this?"}, {"type": "image", "image": image}])


PICTURE = Image.new("RGB", (32, 32))

BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty text": ("", {}, r"the prompt is empty: it has no tokens; give it at least one"),
    "empty ids": ([], {}, r"the prompt is empty"),
    "over the context": (
        [9] * 300,
        {},
        r"300 tokens and max_tokens is 4: 304 .* shorten the prompt by 48",
    ),
    "answer over the context": (
        [9],
        {"max_tokens": 256},
        r"over execution.max_length 256; .*max_tokens to 255",
    ),
    "id over the vocabulary": ([9, 264], {}, r"prompt token 1 is 264; the model knows ids 0 to 263"),
    "negative id": ([-1], {}, r"prompt token 0 is -1"),
    "ids that are none": ([True], {}, r"the prompt is a list of bool; give a text, a list of token ids"),
    "a tensor": (torch.tensor([9]), {}, r"the prompt is a Tensor; give a text, a list of token ids"),
    "nothing": (None, {}, r"the prompt is a NoneType"),
    "unknown role": ([{"role": "me", "content": "hi"}], {}, r"messages\[0\].role is 'me'; allowed: system"),
    "image for a text model": (
        about(PICTURE),
        {},
        r"this model reads text alone: leave the images out",
    ),
    "unknown option": ("hi", {"temprature": 1}, r"unknown option temprature; known: .*temperature"),
    "option out of range": ("hi", {"top_p": 2}, r"sampling parameter top_p is 2; allowed: above 0"),
    "time that is none": ("hi", {"timeout_s": "1"}, r"timeout_s is '1'; give seconds"),
    "cancel that cannot": ("hi", {"cancel": True}, r"cancel is True; give a CancelToken"),
}


@pytest.fixture(scope="module")
def text_engine(checkpoint: MakeCheckpoint) -> Iterator[Engine]:
    with load(checkpoint(MODEL)) as engine:
        yield engine


@pytest.fixture(scope="module")
def vision_engine(checkpoint: MakeCheckpoint) -> Iterator[Engine]:
    with load(checkpoint("Qwen3VLMoe")) as engine:
        yield engine


def refuse(engine: Engine, prompt: Any, message: str, **options: Any) -> None:
    """Refused alike by all four ways to ask, before a pass, and the engine serves on."""
    options = {"max_tokens": 4, **options}
    before = engine.stats()
    for ask in (engine.generate, engine.stream, engine.astream):
        with pytest.raises(RequestError, match=message):
            ask(prompt, **options)
    with pytest.raises(RequestError, match=message):
        asyncio.run(engine.agenerate(prompt, **options))
    assert engine.stats().requests == before.requests
    assert engine.stats().prefill == before.prefill
    assert len(engine.generate("hi", max_tokens=4, ignore_eos=True).token_ids) == 4
    assert_at_rest(engine)


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request(case: str, text_engine: Engine) -> None:
    prompt, options, message = BAD_REQUESTS[case]
    refuse(text_engine, prompt, message, **options)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("hello", r"messages\[0\].content\[1\] is no image: 'hello' is neither a readable file nor base64"),
        (__file__, r"messages\[0\].content\[1\] is no image that can be read"),
        (np.zeros((2, 2, 3)), r"is an array \[2, 2, 3\] of float64, no image: give uint8"),
        (Image.new("RGB", (1, 500)), r"the model's image processor refuses an image of 1 x 500 pixels"),
    ],
    ids=["text", "file", "array", "strip"],
)
def test_an_image_that_is_no_image(image: Any, message: str, vision_engine: Engine) -> None:
    refuse(vision_engine, about(image), message)


PLACE_HOLDER = "<|image_pad|>"
IMAGE_PART = {"type": "image", "image": PICTURE}


@pytest.mark.parametrize(
    ("prompt", "places", "images"),
    [
        (PLACE_HOLDER, 1, 0),
        ([tiny_tokenizer.IMAGE] * 2, 2, 0),
        (chat(f"look: {PLACE_HOLDER}"), 1, 0),
        (chat([{"type": "text", "text": PLACE_HOLDER}, IMAGE_PART]), 2, 1),
    ],
    ids=["text", "ids", "message", "message with an image"],
)
def test_place_holders_without_images(prompt: Any, places: int, images: int, vision_engine: Engine) -> None:
    message = (
        rf"the prompt has {places} image place-holders and {images} images; give messages with one image"
    )
    refuse(vision_engine, prompt, message)


def test_images_without_place_holders(folder: Callable[[str], Path]) -> None:
    path = folder("Qwen3VLMoe")
    drops_images = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}{# image #}"
    (path / "chat_template.jinja").write_text(drops_images)
    with load(path) as engine:
        refuse(engine, about(PICTURE), r"the prompt has 0 image place-holders and 1 images")


def test_an_image_over_the_context(vision_engine: Engine) -> None:
    """Said from its size alone: no pixel is touched, and no expert."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridProcessor, "inputs", lambda *_: pytest.fail("its pixels were prepared"))
        prompt = chat([IMAGE_PART, *[{"type": "image", "image": Image.new("RGB", (600, 600))}] * 20])
        refuse(
            vision_engine,
            prompt,
            r"\(\d+ of them for images\) and max_tokens is 4: .* over execution.max_length 256; .* smaller "
            "or fewer images",
        )


def test_an_image_processor_that_is_not_there(folder: Callable[[str], Path]) -> None:
    path = folder("Qwen3VLMoe")
    (path / "preprocessor_config.json").unlink()
    with load(path) as engine:
        with pytest.raises(CheckpointError, match=r"image processor .* Copy preprocessor_config.json from"):
            engine.generate(about(PICTURE), max_tokens=4)
        assert engine.generate("hi", max_tokens=4, ignore_eos=True).token_ids


def test_messages_without_a_chat_template(folder: Callable[[str], Path]) -> None:
    path = folder(MODEL)
    (path / "chat_template.jinja").unlink()
    with load(path) as engine:
        refuse(engine, chat("hi"), r"no chat template.*pass a plain text prompt, or add chat_template.jinja")


def test_numbers_of_numpy_are_token_ids(text_engine: Engine) -> None:
    ids = prompt_ids(5)[0].numpy()
    options = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = text_engine.generate(ids.tolist(), options, cancel=CancelToken())
    assert text_engine.generate(list(ids), options).token_ids == expected.token_ids
