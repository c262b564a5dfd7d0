"""The widened model (`bench/vl/widening.py`) as a folder that transformers and the engine load.

`python -m bench.vl.wide_checkpoint FOLDER`
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from bench.models.random_checkpoint import INDEX
from bench.vl.held_out import MODEL
from bench.vl.wide_geometry import WideGeometry, add_wide_geometry, wide_geometry_of
from bench.vl.widening import Widening

_WRITERS = 4
_MOST_PIXELS = 1 << 24
_KEPT_FILES = ("generation_config.json", "chat_template.jinja", "processor_config.json", "tokenizer.json")


def ensure_widened(folder: Path, geometry: WideGeometry) -> Path:
    """`folder`, written now unless the same model is there already."""
    mark = folder / "widened.json"
    content = json.dumps(asdict(geometry))
    if mark.is_file() and mark.read_text(encoding="utf-8") == content:
        return folder
    began = time.perf_counter()
    mark.unlink(missing_ok=True)
    num_bytes = write_widened(folder, geometry)
    mark.write_text(content, encoding="utf-8")
    print(f"wrote {num_bytes / 1e9:.1f} GB to {folder} in {time.perf_counter() - began:.0f} s", flush=True)
    return folder


def write_widened(folder: Path, geometry: WideGeometry) -> int:
    """Write the model to `folder`, and return the bytes of its weights. The same geometry gives the same."""
    folder.mkdir(parents=True, exist_ok=True)
    wide = Widening(geometry)
    _write_words(folder, wide)
    parts = {f"layer-{layer:02d}.safetensors": layer for layer in range(geometry.layers)}
    map_of: dict[str, str] = {}

    def write(name: str, tensors: dict[str, Tensor]) -> int:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        map_of.update(dict.fromkeys(tensors, name))
        return sum(tensor.nbytes for tensor in tensors.values())

    num_bytes = write("ends.safetensors", dict(wide.ends()))
    with ThreadPoolExecutor(min(_WRITERS, os.cpu_count() or 1)) as pool:
        num_bytes += sum(pool.map(lambda name: write(name, dict(wide.layer(parts[name]))), parts))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": map_of}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return num_bytes


def _write_words(folder: Path, wide: Widening) -> None:
    """Configuration, tokenizer, image processor: pictures keep the size that they have."""
    geometry, config = wide.geometry, wide.config
    for name in _KEPT_FILES:
        shutil.copy(MODEL / name, folder / name)
    _write_changed(folder, "tokenizer_config.json", {"model_max_length": geometry.max_length})
    _write_changed(
        folder,
        "preprocessor_config.json",
        {
            "patch_size": geometry.patch,
            "size": {"shortest_edge": 4 * geometry.patch**2, "longest_edge": _MOST_PIXELS},
        },
    )
    text, vision = config["text_config"], config["vision_config"]
    longer = geometry.head_dim // text["head_dim"]
    sections = [longer * section for section in text["rope_parameters"]["mrope_section"]]
    wide_text = text | {
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "num_experts_per_tok": text["num_experts_per_tok"] * geometry.experts // text["num_local_experts"],
        "num_local_experts": geometry.experts,
        "moe_intermediate_size": geometry.intermediate,
        "max_position_embeddings": geometry.max_length,
        "rope_parameters": text["rope_parameters"]
        | {"rope_theta": wide.queries.theta, "mrope_section": sections},
        "tie_word_embeddings": False,
    }
    wide_vision = vision | {
        "hidden_size": geometry.vision_hidden,
        "num_heads": geometry.vision_heads,
        "intermediate_size": geometry.vision_intermediate,
        "out_hidden_size": geometry.hidden,
        "patch_size": geometry.patch,
        "rope_parameters": vision["rope_parameters"] | {"rope_theta": wide.patches.theta},
    }
    changes = {"text_config": wide_text, "vision_config": wide_vision, "tie_word_embeddings": False}
    _write_changed(folder, "config.json", changes)


def _write_changed(folder: Path, name: str, changes: dict[str, object]) -> None:
    content = json.loads((MODEL / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(content | changes, indent=1), encoding="utf-8")


def main() -> None:
    """Write the checkpoint that the command line describes, unless it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    add_wide_geometry(parser)
    arguments = parser.parse_args()
    ensure_widened(arguments.folder, wide_geometry_of(arguments))


if __name__ == "__main__":
    main()
