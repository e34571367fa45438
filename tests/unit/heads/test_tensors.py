"""Parameters of the modules have the names and shapes that other projects write."""

from __future__ import annotations

from typing import Any

import pytest

from block_samples import ALL, DRAFTED, EAGLE_1, EAGLE_3, FLASH, PARALLEL, SPARK, config_of, random_head
from head_tensors import tensor_shapes

VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((values, {}) for values in ALL.values()),
    (EAGLE_3, {"fc_norm": True, "norm_output": True, "num_layers": 2}),
    (EAGLE_3, {"norm_before_fc": True, "qk_norm": True, "own_embedding": True, "own_output": False}),
    (EAGLE_3, {"attention_bias": True, "output_bias": True, "mlp_bias": True, "fc_bias": True}),
    (EAGLE_1, {"num_layers": 2, "fc_bias": False, "attention_bias": True}),
    (PARALLEL, {"own_embedding": True}),
    (FLASH, {"attention_bias": True, "output_bias": True, "own_output": True, "draft_vocab_size": DRAFTED}),
    (SPARK, {"markov_type": "gated", "confidence_with_markov": False}),
    (SPARK, {"markov_type": "rnn", "has_confidence": False, "confidence_with_markov": False, "own_embedding": True}),
    (SPARK, {"markov_rank": 0, "confidence_with_markov": False}),
]


@pytest.mark.parametrize(("values", "others"), VARIANTS)
def test_parameters_have_the_names_and_shapes_of_other_projects(values: dict[str, Any], others: dict[str, Any]) -> None:
    config = config_of(values, **others)
    found = {name: tuple(tensor.shape) for name, tensor in random_head(config).state_dict().items()}
    assert found == tensor_shapes(config)
