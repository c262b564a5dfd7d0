"""What one row of the cache takes, by kind of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.errors import CheckpointError
from hetero_runtime.plan.kv import KvGeometry, LayerKv, read_kv
from hetero_runtime.plan.model_config import TextConfig

GROUPED: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
FULL = 2 * 2 * 64


def _kv(config: dict[str, Any], num_layers: int = 4) -> KvGeometry:
    return read_kv(TextConfig(Path("config.json"), config), num_layers)


def test_grouped_heads() -> None:
    kv = _kv(GROUPED)
    assert kv.bytes_per_token(2) == 4 * FULL * 2
    assert kv.row_bytes(1000, 2) == 1000 * 4 * FULL * 2


def test_head_size_is_the_quotient_where_it_is_not_given() -> None:
    assert _kv({**GROUPED, "head_dim": None}).bytes_per_token(2) == 4 * FULL * 2


def test_latent_attention_keeps_one_compressed_vector() -> None:
    assert _kv({**GROUPED, "kv_lora_rank": 512, "qk_rope_head_dim": 64}).bytes_per_token(2) == 4 * 576 * 2


@pytest.mark.parametrize(
    "kinds", [["sliding_attention", "full_attention"] * 2, None], ids=["said", "default"]
)
def test_sliding_layers_stop_at_their_window(kinds: list[str] | None) -> None:
    kv = _kv({**GROUPED, "sliding_window": 128, "layer_types": kinds, "model_type": "gpt_oss"})
    assert kv.bytes_per_token(2) == 2 * FULL * 2
    assert kv.row_bytes(1000, 2) == (2 * 1000 + 2 * 128) * FULL * 2


def test_a_window_that_is_switched_off_counts_for_nothing() -> None:
    kv = _kv({**GROUPED, "sliding_window": 128, "use_sliding_window": False})
    assert kv.row_bytes(1000, 2) == 4 * 1000 * FULL * 2


def test_first_layers_below_max_window_layers_are_full() -> None:
    kv = _kv({**GROUPED, "sliding_window": 100, "use_sliding_window": True, "max_window_layers": 3})
    assert kv.row_bytes(1000, 2) == (3 * 1000 + 100) * FULL * 2


def test_linear_layers_have_a_state_of_fixed_size() -> None:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    }
    kv = _kv({**GROUPED, **linear})
    state = (2 * 32 + 4 * 32) * 4 + 4 * 16 * 32
    assert kv.row_bytes(1000, 2) == 1000 * FULL * 2 + 3 * state * 4
    assert kv.row_bytes(2000, 2) - kv.row_bytes(1000, 2) == 1000 * FULL * 2


def test_a_config_that_misses_a_number_names_it() -> None:
    with pytest.raises(CheckpointError, match="has none of qk_rope_head_dim"):
        _kv({**GROUPED, "kv_lora_rank": 512})


def test_our_own_cache_has_room_for_every_token_of_a_sliding_layer() -> None:
    layer = LayerKv(elements=8, window=128)
    assert layer.num_bytes(1000, 2) == 128 * 8 * 2
    assert layer.num_bytes(1000, 2, is_fixed=True) == 1000 * 8 * 2
