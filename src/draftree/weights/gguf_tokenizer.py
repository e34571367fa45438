"""Construction of the tokenizer that a GGUF file describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftree.core.errors import UnsupportedModelError
from draftree.weights.gguf_file import GgufFile
from draftree.weights.tokenizers_from_pieces import (
    CUTTING_RULES,
    WORD_START,
    TokenizerSettings,
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["end_ids", "save_gguf_tokenizer", "token_id"]

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_ROLES = ("eos", "eot", "eom")
TURN_ENDS = frozenset(
    {
        "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>",
        "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
    }
)  # fmt: skip
"""Pieces that end a turn in the chat templates of known families. Files often declare the end of a document only."""
MESSAGE_END = "<|end|>"
ANSWER_END = "<|return|>"
"""With the second in the vocabulary (gpt-oss), the first ends a message, after which the answer goes on."""


def save_gguf_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the file's tokenizer as a transformers tokenizer.

    Raises:
        ModelLoadError: The file has no vocabulary.
        UnsupportedModelError: Its kind of tokenizer, or its pre-tokenization rule, is not supported.
    """
    pieces = spelled_pieces(file)
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    roles = {role: token_id(file, key) for role, key in ROLES.items()}
    special = {index for index, kind in enumerate(kinds) if kind == CONTROL} | set(end_ids(file))
    settings = TokenizerSettings(
        special=tuple(sorted(special)),
        # Runs of spaces match as ordinary pieces: text is normalized before the merges, after these are searched.
        whole=tuple(
            index
            for index, kind in enumerate(kinds)
            if kind == USER_DEFINED and WORD_START not in pieces[index] and index not in special
        ),
        roles={role: index for role, index in roles.items() if index is not None},
        adds_bos=adds_bos(file),
        context_length=file.metadata[f"{file.metadata['general.architecture']}.context_length"],
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )
    save_tokenizer(build(file, pieces), pieces, settings, folder=folder)


def spelled_pieces(file: GgufFile) -> list[str]:
    pieces = file.metadata.get("tokenizer.ggml.tokens")
    if not pieces:
        raise file.broken("it has no vocabulary")
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        pieces = [piece.replace(" ", WORD_START) for piece in pieces]
    if len(set(pieces)) != len(pieces):
        raise file.broken("two pieces of its vocabulary have the same text")
    return list(pieces)


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of the token with a role, such as "bos"; None if the file declares none.

    Raises:
        ModelLoadError: the vocabulary has no such id.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    found = file.metadata.get(key)
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < count:
        raise file.broken(f"{key} is {found}, and its vocabulary has {count} pieces")
    return found


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the file declares, and the `TURN_ENDS` in its vocabulary.

    Raises:
        ModelLoadError: the file has no vocabulary, or declares an id that is not in it.
    """
    pieces = {piece: index for index, piece in enumerate(spelled_pieces(file))}
    declared = (token_id(file, role) for role in END_ROLES)
    named = TURN_ENDS - ({MESSAGE_END} if ANSWER_END in pieces else set())
    found = [index for index in declared if index is not None]
    return tuple(dict.fromkeys([*found, *sorted(pieces[piece] for piece in named if piece in pieces)]))


def adds_bos(file: GgufFile) -> bool:
    # Older files lack the key: SentencePiece vocabularies begin every text with the bos token.
    default = file.metadata.get("tokenizer.ggml.model") == "llama"
    is_added = bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))
    if is_added and token_id(file, "bos") is None:
        raise file.broken(
            "texts of its model begin with a bos token, and it does not say which one (tokenizer.ggml.bos_token_id)"
        )
    return is_added


def build(file: GgufFile, pieces: list[str]) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        unknown = token_id(file, "unknown")
        return sentencepiece_tokenizer(
            pieces,
            merge_ranks(file, len(pieces)),
            starts_with_space=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True)),
            unknown=None if unknown is None else pieces[unknown],
        )
    rule = file.metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and rule in CUTTING_RULES:
        return byte_level_tokenizer(pieces, file.metadata["tokenizer.ggml.merges"], rule=rule)
    raise UnsupportedModelError(
        f"the tokenizer in '{file.path}' is of the kind '{kind}' and splits text by the rule '{rule}', "
        f"which is not supported: use the model's own folder "
        f"(known: kind 'llama', and kind 'gpt2' with {', '.join(CUTTING_RULES)})"
    )


def merge_ranks(file: GgufFile, num_pieces: int) -> list[float]:
    if file.metadata["general.architecture"].startswith("gemma"):
        # Gemma's scores do not give the order of merges; its pieces are stored in that order.
        return list(range(num_pieces))
    return [-score for score in file.metadata["tokenizer.ggml.scores"]]
