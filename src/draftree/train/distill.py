"""Distillation of a target into a small whole model with the target's tokens, for drafter `model:FOLDER`.

The student reads the target's own texts; its loss compares both distributions after every token of the answers, with
the target's rows from cached hidden states. Levels of drafts need no unrolling: a model reads tokens only.

Sources: DistillSpec, arXiv 2310.08461; acceptance losses as for heads (`train/losses.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError
from draftree.heads.vocabulary import DraftVocabulary
from draftree.loading.resolve import resolve_model
from draftree.text.retokenize import Lexicon, compare_vocabularies, lexicon_of, read_specials
from draftree.text.tokenizer import Tokenizer
from draftree.train.batches import Batch
from draftree.train.finishing import TrainingResult, train
from draftree.train.head_trainee import TextTrainee
from draftree.train.preparing import Note, Prepared, Report, TrainingJob, ignore, prepare
from draftree.train.settings import TrainSettings

# Another vocabulary for a model: its embeddings and its output head are rewritten for the tokens of a target.
#
# A token that the model has too keeps its row; any other token starts as the mean of the rows of the tokens that spell
# it. Frequent tokens of two vocabularies are mostly the same words, so the model still writes fluent text, and training
# has to learn the remaining rows only.
#
# Source: mean of subwords as first embeddings: Gee et al., "Fast Vocabulary Transfer for Language Model Compression",
# 2022 (arXiv 2402.09977).


def spell_vocabulary(target: Lexicon, lexicon: Lexicon, *, size: int) -> tuple[list[tuple[int, ...]], int]:
    """Return the model's ids for each id of a target, none for an id without text, and how many tokens both have."""
    specials = read_specials(target, lexicon)
    pieces: list[tuple[int, ...]] = [()] * size
    shared = 0
    for token in range(min(size, len(target.bytes_of))):
        data = target.bytes_of[token]
        if data and target.ids_of[data] == token:
            pieces[token] = (
                (lexicon.ids_of[data],) if data in lexicon.ids_of else tuple(lexicon.read(data, begins=False))
            )
            shared += data in lexicon.ids_of
        elif token == target.bos_id and lexicon.bos_id is not None:
            pieces[token] = (lexicon.bos_id,)
        elif token in specials:
            text = specials[token]
            pieces[token] = tuple(lexicon.read(text, begins=False)) if isinstance(text, bytes) else text
    if not shared:
        raise ConfigurationError(
            f"{lexicon.name} and {target.name} have no token in common, so the first cannot start a student of the "
            "second: choose another model, or leave out --from for a new one"
        )
    return pieces, shared


@torch.no_grad()
def transplant(model: Any, pieces: Sequence[tuple[int, ...]]) -> None:
    """Give a transformers model the vocabulary that its ids spell, in place; tied embeddings stay tied."""
    embedding = mean_rows(model.get_input_embeddings().weight, pieces)
    output = mean_rows(model.get_output_embeddings().weight, pieces)
    model.resize_token_embeddings(len(pieces), mean_resizing=False)
    model.get_input_embeddings().weight.copy_(embedding)
    model.get_output_embeddings().weight.copy_(output)


def mean_rows(rows: Tensor, pieces: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the mean of some rows for each token; the mean of all rows where there are none, shape (tokens, width)."""
    owners = torch.tensor([token for token, ids in enumerate(pieces) for _ in ids], dtype=torch.int64)
    chosen = torch.tensor([token for ids in pieces for token in ids], dtype=torch.int64)
    counts = torch.tensor([len(ids) for ids in pieces])
    means = rows.new_zeros(len(pieces), rows.shape[1]).index_add_(0, owners, rows[chosen])
    means /= counts.clamp_min(1)[:, None]
    means[counts == 0] = rows.mean(dim=0)
    return means


@dataclass(frozen=True, slots=True)
class StudentOptions:
    start: str | None = None  # name of a model that training starts from; None for a new one of the sizes below
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kept_layers: int | None = None  # number of layers of the given model that stay; None for all

    def __post_init__(self) -> None:
        require_positive(self, "hidden", "layers", "heads", "kept_layers")
        if self.kept_layers is not None and self.start is None:
            raise ConfigurationError(
                f"kept_layers is {self.kept_layers}, but no model is given to keep layers of: give --from, or --layers "
                "for a new model"
            )
        if self.hidden % (2 * self.heads):
            raise ConfigurationError(
                f"hidden is {self.hidden} and heads is {self.heads}: each head must have an even width, so hidden must "
                "be a multiple of twice the heads"
            )


def new_student(prepared: Prepared, options: StudentOptions) -> Any:
    """Return the student before training, in the dtype of computation.

    Its context is the longest text that it is trained on, or that of the given model if it is longer: distances of
    rotary positions that were never trained on are not reliable. In longer texts, drafter `model` reads the last part.
    """
    context = max(len(prepared.data[number].tokens) for number in (*prepared.seen, *prepared.unseen))
    if prepared.settings.max_length is not None:
        context = min(context, prepared.settings.max_length)
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    student: Any
    if options.start is None:
        rope = getattr(prepared.config, "rope_parameters", None) or {}
        torch.manual_seed(prepared.settings.seed)
        student = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=prepared.parts.vocab_size,
                hidden_size=options.hidden,
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                num_key_value_heads=options.heads,
                intermediate_size=32 * -(-8 * options.hidden // 96),  # 8/3 of the width
                max_position_embeddings=context,
                rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
                tie_word_embeddings=True,
                **special_ids(prepared.config),
            )
        )
    else:
        folder = resolve_model(options.start)
        student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        adopt_vocabulary(student, options.start, folder, prepared)
        if options.kept_layers is not None:
            keep_layers(student, options.kept_layers)
        context = extend_context(student, options.start, context)
    prepared.note(f"the student reads up to {context:,} tokens at a time, and the last part of longer texts")
    return student.to(device=prepared.processes.device, dtype=prepared.dtype)


def extend_context(student: Any, name: str, wanted: int) -> int:
    """Let a given model read at least so many tokens; return how many it reads."""
    max_length = int(getattr(student.config, "max_position_embeddings", wanted))
    if max_length >= wanted:
        return max_length
    if not getattr(student.config, "rope_parameters", None):
        raise ConfigurationError(
            f"'{name}' reads {max_length} tokens, and the longest text of the data has {wanted}: cut the texts with "
            f"--max-length {max_length}, or choose a model with rotary positions"
        )
    student.config.max_position_embeddings = wanted
    return wanted


def special_ids(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def adopt_vocabulary(student: Any, name: str, folder: Path, prepared: Prepared) -> None:
    """Give a model the target's vocabulary if it has another one."""
    width, wanted = student.get_output_embeddings().weight.shape[0], prepared.parts.vocab_size
    assert prepared.loaded.folder is not None, "checked when its configuration was read"
    tokenizer, target = Tokenizer.load(folder), Tokenizer.load(prepared.loaded.folder)
    if tokenizer is None or target is None:
        if width != wanted:
            raise ConfigurationError(
                f"'{name}' has {width} tokens and the target {wanted}, and there are no two tokenizers to compare: "
                "choose a model with the target's tokens, or leave out --from for a new one"
            )
        return
    if width == wanted and compare_vocabularies(target.vocabulary(), tokenizer.vocabulary()).same:
        return
    pieces, shared = spell_vocabulary(lexicon_of(target), lexicon_of(tokenizer), size=wanted)
    transplant(student, pieces)
    for key, value in special_ids(prepared.config).items():
        setattr(student.config, key, value)
    prepared.note(
        f"'{name}' has other tokens: {shared:,} of the target's {wanted:,} keep its weights, the others start "
        "as means of the tokens that spell them"
    )


def keep_layers(student: Any, count: int) -> None:
    """Keep some layers of a model, evenly spaced and with the first and the last, in place."""
    decoder = student.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigurationError(f"the layers of a '{student.config.model_type}' model cannot be removed: keep all")
    if count > len(layers):
        raise ConfigurationError(f"kept_layers is {count}, but the given model has {len(layers)} layers")
    last = len(layers) - 1
    chosen = [round(place * last / max(1, count - 1)) for place in range(count)]
    decoder.layers = nn.ModuleList(layers[place] for place in chosen)
    for place, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = place
    student.config.num_hidden_layers = count
    kinds = getattr(student.config, "layer_types", None)
    if kinds is not None:
        student.config.layer_types = [kinds[place] for place in chosen]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class StudentTrainee(TextTrainee):
    """A transformers model in training; its logits after a token do not depend on the level."""

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states after each chain's token and, for later levels, after the tokens that follow it."""
        rows = batch.rows
        tokens = torch.zeros(rows.num_texts, rows.longest + 1, dtype=torch.int64, device=batch.tokens.device)
        tokens[:, 0] = torch.stack([text.tokens[0] for text in batch.texts])
        tokens[:, 1:] = rows.padded(batch.tokens)
        # padding is at the end, where causal rows of the text do not look
        hidden = self.module.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        states = hidden[rows.texts[batch.chains], rows.columns[batch.chains] + 1]
        for level in range(levels):
            yield states[batch.step_chains(level)] if level else states

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        return self.module.get_output_embeddings()(states).float()


def train_student(
    job: TrainingJob,
    settings: TrainSettings,
    options: StudentOptions,
    *,
    report: Report = ignore,
    note: Note = ignore,
) -> TrainingResult:
    """Train a student at the first level and write its folder, in the layout of transformers, with a tokenizer."""
    if settings.levels != 1:
        raise ConfigurationError(f"levels is {settings.levels}: a whole model has no states of its own to read; set 1")
    prepared = prepare(job, settings, report, note)
    student = new_student(prepared, options)
    vocabulary = DraftVocabulary.full(prepared.parts.vocab_size).to(prepared.processes.device)
    trainee = StudentTrainee.of(prepared, student, prepared.data, vocabulary=vocabulary)

    def write() -> dict[str, Any]:
        student.to(prepared.loaded.model.dtype).save_pretrained(job.output)
        folder = prepared.loaded.folder
        assert folder is not None, "checked when its configuration was read"
        for name in TOKENIZER_FILES:
            if (folder / name).is_file() and not (job.output / name).exists():
                shutil.copyfile(folder / name, job.output / name)
        return {"student": {"start": options.start, "config": student.config.to_diff_dict()}}

    return train(prepared, trainee, write, kind="Distilled drafter", usage=f"model:{job.output}")
