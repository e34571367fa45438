"""Another vocabulary for a model that training starts from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import spelling
from draftree.core.errors import ConfigurationError
from draftree.models.torch.inspection import cache_name
from draftree.text.retokenize import Lexicon, lexicon_of
from draftree.train.distill import StudentOptions, keep_layers, mean_rows, spell_vocabulary, transplant

WIDTH = 8


def model(*, vocab: int, tied: bool, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            max_position_embeddings=32,
        )
    )


def lexicons() -> tuple[Lexicon, Lexicon]:
    """A target, and a model without the target's tokens of several letters, with other ids."""
    target = lexicon_of(spelling.tokenizer())
    singles = [data for data in target.bytes_of if data is not None and len(data) == 1]
    table = [None, *reversed(singles)]
    ids = {data: place for place, data in enumerate(table)}
    own = replace(
        target,
        name="own",
        bytes_of=tuple(table),
        byte_ids=frozenset(),
        specials={"<end>": 0},
        encode=lambda text: [ids[bytes([byte])] for byte in text.encode()],
        eos_id=0,
        bos_id=None,
        ignored_ids=frozenset(),
    )
    return target, own


def test_common_tokens_keep_their_rows_and_others_are_spelled() -> None:
    target, own = lexicons()
    pieces, shared = spell_vocabulary(target, own, size=len(target.bytes_of) + 4)
    texts = {token: data for token, data in enumerate(target.bytes_of) if data}
    assert shared == sum(len(data) == 1 for data in texts.values())
    for token, data in texts.items():
        assert b"".join(own.bytes_of[one] or b"" for one in pieces[token]) == data
        assert len(pieces[token]) == len(data)
    assert pieces[spelling.EOS] == (0,), "the ends of text correspond"
    assert pieces[0] == (), "padding has no text"
    assert list(pieces[-4:]) == [()] * 4, "ids beyond the vocabulary"


def test_of_several_tokens_with_equal_bytes_one_is_written() -> None:
    target, own = lexicons()
    letter = target.ids_of[b"a"]
    twice = replace(target, bytes_of=(*target.bytes_of, b"a"))
    pieces, _ = spell_vocabulary(twice, own, size=len(twice.bytes_of))
    assert pieces[letter] == (own.ids_of[b"a"],)
    assert pieces[-1] == (), "both would have equal logits"


def test_vocabularies_without_a_common_token_are_refused() -> None:
    target, own = lexicons()
    strange = replace(own, bytes_of=(None, b"\xff"), encode=lambda text: [])
    with pytest.raises(ConfigurationError, match="no token in common"):
        spell_vocabulary(target, strange, size=len(target.bytes_of))


def test_mean_rows() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]])
    found = mean_rows(rows, [(1,), (0, 1), (2, 2), ()])
    assert found.tolist() == [[3.0, 6.0], [2.0, 4.0], [5.0, 1.0], [3.0, 3.0]]


@pytest.mark.parametrize("tied", [True, False])
def test_a_transplanted_model_computes_the_same_for_common_tokens(tied: bool) -> None:
    student = model(vocab=5, tied=tied)
    tokens = torch.tensor([[4, 1, 0, 2]])
    with torch.no_grad():
        before = student(input_ids=tokens).logits
    # the target's ids are those of the model plus 1; its id 0 is spelled by two tokens
    transplant(student, [(0, 3), (0,), (1,), (2,), (3,), (4,), ()])
    with torch.no_grad():
        after = student(input_ids=tokens + 1).logits
    assert after.shape[-1] == student.config.vocab_size == 7
    torch.testing.assert_close(after[..., 1:6], before)
    torch.testing.assert_close(after[..., 0], (before[..., 0] + before[..., 3]) / 2)
    torch.testing.assert_close(after[..., 6], before.mean(dim=-1))
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == tied


def test_kept_layers_are_evenly_spaced() -> None:
    student = model(vocab=5, tied=True, layers=7)
    layers = list(student.model.layers)
    keep_layers(student, 4)
    assert [layers.index(layer) for layer in student.model.layers] == [0, 2, 4, 6]
    assert student.config.num_hidden_layers == 4
    with torch.no_grad():
        whole = student(input_ids=torch.tensor([[1, 2, 3]])).logits
        name = cache_name(student.forward)
        first = student(input_ids=torch.tensor([[1, 2]]), use_cache=True)
        last = student(input_ids=torch.tensor([[3]]), **{name: first[name]}).logits
    torch.testing.assert_close(last[:, -1], whole[:, -1])
    with pytest.raises(ConfigurationError, match="kept_layers is 5, but the given model has 4 layers"):
        keep_layers(student, 5)


def test_a_pruned_model_is_saved_with_its_layers(tmp_path: Path) -> None:
    student = model(vocab=5, tied=True, layers=5)
    keep_layers(student, 2)
    student.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, student(input_ids=tokens).logits)


def test_kept_layers_need_a_given_model() -> None:
    with pytest.raises(ConfigurationError, match="kept_layers is 3, but no model is given"):
        StudentOptions(kept_layers=3)
