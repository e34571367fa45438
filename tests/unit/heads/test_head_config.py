from __future__ import annotations

from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.heads.config import HeadConfig

SIZES: dict[str, Any] = {
    "kind": "eagle3",
    "features": (2, 4, -1),
    "target_hidden": 16,
    "hidden": 16,
    "vocab_size": 64,
    "draft_vocab_size": 32,
    "depth": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate": 24,
}


def test_a_valid_configuration_is_kept() -> None:
    config = HeadConfig(**SIZES)
    assert (config.num_layers, config.is_block, config.is_full) == (1, False, False)
    assert config.changed(draft_vocab_size=64).is_full
    assert config.changed(depth=2) != config
    assert config.changed() == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "eagel"}, "did you mean 'eagle"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": 16.0}, "hidden is 16.0"),
        ({"conv_taps": -1}, "conv_taps is -1"),
        ({"depth": True}, "depth is True"),
        ({"num_heads": 1 << 40}, "num_heads is"),
        ({"draft_vocab_size": 65}, "at most the target's 64"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"features": ()}, "at least one layer"),
        ({"features": (2, 2, 3)}, "each once"),
        ({"features": (2.0,)}, "layers are integers"),
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": 5}, "even number"),
        ({"activation": "tanh"}, "activation 'tanh'"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"mask_token_id": 64}, "mask_token_id is 64"),
        ({"kind": "eagle"}, "reads one hidden state"),
        ({"kind": "eagle", "features": (-1,), "norm_output": True}, "norm_output is a variant"),
        ({"kind": "dflash"}, "block_size is 0"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        HeadConfig(**{**SIZES, **values})


def test_a_head_without_layers_needs_no_sizes_of_layers() -> None:
    config = HeadConfig(
        kind="medusa",
        features=(-1,),
        target_hidden=8,
        hidden=8,
        vocab_size=9,
        draft_vocab_size=9,
        depth=3,
        num_layers=0,
        block_size=3,
    )
    assert config.is_block
