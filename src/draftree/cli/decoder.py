"""Options of encoder-decoder models on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.options import TEXT

if TYPE_CHECKING:
    from draftree.prompts import DecoderOptions

__all__ = ["decoder_of"]

DecoderPrompt = Annotated[
    str | None,
    typer.Option(
        help="Encoder-decoder models: what the decoder continues; its tokens are not part of the text.",
        metavar="TEXT",
        rich_help_panel=TEXT,
    ),
]
SourceLang = Annotated[
    str | None,
    typer.Option(
        help="Multilingual models: language of the prompt, as the tokenizer writes it (en, en_XX, eng_Latn).",
        metavar="CODE",
        rich_help_panel=TEXT,
    ),
]
TargetLang = Annotated[
    str | None,
    typer.Option(
        help="Multilingual models: language of the text, as the tokenizer writes it.",
        metavar="CODE",
        rich_help_panel=TEXT,
    ),
]


def decoder_of(
    *, decoder_prompt: DecoderPrompt = None, source_lang: SourceLang = None, target_lang: TargetLang = None
) -> DecoderOptions:
    """Return the options of a command."""
    return {"decoder_prompt": decoder_prompt, "source_lang": source_lang, "target_lang": target_lang}
