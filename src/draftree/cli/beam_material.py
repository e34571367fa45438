"""Texts and further models of `draftree beam`: what they are before and after the model is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.beam.params import BeamSearchParams
from draftree.beam.trie import TokenTrie
from draftree.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from draftree.llm import LLM

PANEL = "Search"
Phrases = Annotated[
    list[str] | None,
    typer.Option(
        help="A phrase that every text contains, in the tokenizer's own split of it; repeatable.",
        metavar="TEXT",
        rich_help_panel=PANEL,
    ),
]
AllowedTexts = Annotated[
    Path | None,
    typer.Option(
        help="A file with a text in each line: the result is one of them. Blank lines are left out.",
        metavar="FILE",
        rich_help_panel=PANEL,
    ),
]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        help="A further model of the same vocabulary, whose probabilities are averaged; repeatable.",
        metavar="MODEL",
        rich_help_panel=PANEL,
    ),
]
LanguageModelName = Annotated[
    str | None,
    typer.Option(
        "--lm-model",
        help="A causal model of the same vocabulary, whose log-probabilities are added (shallow fusion).",
        metavar="MODEL",
        rich_help_panel=PANEL,
    ),
]
Weight = Annotated[
    float, typer.Option(help="Weight of the log-probabilities of --lm-model.", metavar="NUMBER", rich_help_panel=PANEL)
]


@dataclass(frozen=True, slots=True)
class Material:
    """Texts and models of a search.

    Attributes:
        phrases: texts that every result contains.
        allowed: texts that a result may be; empty for any.
        ensemble: names of further models.
        lm_model: name of the language model; None for none.
        lm_weight: its weight.
    """

    phrases: Sequence[str]
    allowed: Sequence[str]
    ensemble: Sequence[str]
    lm_model: str | None
    lm_weight: float

    @property
    def checked_as(self) -> dict[str, Any]:
        """Parameters that stand for the texts, so that conflicts are found before a model is loaded.

        Raises:
            typer.BadParameter: a weight without a model.
        """
        if self.lm_weight != 1.0 and self.lm_model is None:
            raise typer.BadParameter("it needs --lm-model", param_hint="--lm-weight")
        phrases = {"force_words_ids": [[0]]} if self.phrases else {}
        return phrases | ({"allowed_trie": TokenTrie([[0]])} if self.allowed else {})

    @property
    def model_names(self) -> list[str]:
        """Names of all further models."""
        return [*self.ensemble, *([] if self.lm_model is None else [self.lm_model])]

    def loaded(self, params: BeamSearchParams, llm: LLM) -> BeamSearchParams:
        """Return the parameters with token ids and loaded models.

        Raises:
            DraftreeError: a text without tokens, or a model that cannot be loaded or does not fit.
        """
        found: dict[str, Any] = {}
        if self.phrases:
            found["force_words_ids"] = [_ids(llm, text) for text in self.phrases]
        if self.allowed:
            found["allowed_trie"] = TokenTrie([_ids(llm, text) for text in self.allowed])
        if self.ensemble:
            found["models"] = [llm.companion(name) for name in self.ensemble]
        if self.lm_model is not None:
            found |= {"lm_model": llm.companion(self.lm_model), "lm_weight": self.lm_weight}
        return dataclasses.replace(params, **found)


def _ids(llm: LLM, text: str) -> list[int]:
    ids = llm.prompts.encode_text(text, add_special_tokens=False)
    if not ids:
        raise InvalidRequestError(f"{text!r} has no tokens: leave it out", param="prompt")
    return ids


def read_texts(path: Path | None) -> list[str]:
    """Return the lines of a file that are not blank; empty without a file.

    Raises:
        typer.BadParameter: it cannot be read, or has no text.
    """
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--allowed-texts") from error
    if not lines:
        raise typer.BadParameter(f"{path} has no text", param_hint="--allowed-texts")
    return lines
