"""Every field that the official client knows is either in a request model or refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import openai.types.chat.completion_create_params as chat
import openai.types.completion_create_params as completions
import pytest

from draftree.serve.schema.chat import ChatBody
from draftree.serve.schema.common import SamplingBody
from draftree.serve.schema.completions import CompletionBody


def known(model: type[SamplingBody]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()} | set(model.refused)


@pytest.mark.parametrize(
    ("model", "typed"),
    [
        (ChatBody, chat.CompletionCreateParamsStreaming),
        (CompletionBody, completions.CompletionCreateParamsStreaming),
    ],
)
def test_the_clients_fields_are_known(model: type[SamplingBody], typed: Any) -> None:
    fields = set(get_type_hints(typed))
    assert {"model", "stream", "seed", "logit_bias"} <= fields
    assert fields - known(model) == set()


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_a_field_is_not_honoured_and_refused_at_once(model: type[SamplingBody]) -> None:
    assert {field.alias or name for name, field in model.model_fields.items()} & set(model.refused) == set()
