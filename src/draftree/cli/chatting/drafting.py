"""The model of a chat with its current drafter, which can be switched between two answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from draftree.assembly import Methods
from draftree.cli.progress import resolve_with_bar, waiting
from draftree.cli.writing import Setup, fetch_and_load
from draftree.core.errors import ConfigurationError
from draftree.drafters import NO_DRAFT, drafts
from draftree.loading.loaded import LoadedModel
from draftree.loading.tokenizers import load_tokenizer
from draftree.remote.address import is_remote
from draftree.text.tokenizer import Tokenizer

__all__ = ["Drafting", "require_material"]


class Drafting:
    """A loaded model and the drafter of the next answer. Mutated by `switch`.

    Args:
        setup: the model and the methods.
        has_grammar: whether answers follow a grammar.

    Raises:
        ConfigurationError: the methods do not fit together, or the model has no chat template.
        ModelError: the model cannot be found or used.
    """

    def __init__(self, setup: Setup, *, has_grammar: bool) -> None:
        require_material(setup.methods(), has_grammar=has_grammar)
        self._loaded, self._tokenizer = load_for_chat(setup)
        self._has_grammar = has_grammar
        self._start = setup
        self.setup = setup.decided(self._loaded)
        self.llm = self.setup.over(self._loaded, tokenizer=self._tokenizer)

    @property
    def name(self) -> str:
        """Spec of the current drafter, or "none"."""
        return NO_DRAFT if self.setup.is_plain else str(self.setup.draft)

    def switch(self, draft: str) -> None:
        """Use another drafter, or none, from the next answer on. The model and earlier drafters stay loaded.

        Raises:
            ConfigurationError: the drafter is unknown or does not fit; the current one stays.
            ModelError: its model cannot be found or used; the current one stays.
        """
        plan = self._start.plan if drafts(draft) else None
        setup = dataclasses.replace(self.setup, draft=draft, plan=plan, auto_note="").decided(self._loaded)
        draft, methods = str(setup.draft), setup.methods()
        require_material(methods, has_grammar=self._has_grammar)
        if drafts(draft) and draft not in self.llm.drafts:
            for name in methods.draft_models:
                resolve_with_bar(name)
            with waiting(f"loading drafter {draft}"):
                llm = self._start.over(self._loaded, drafters=(draft, *self.llm.drafts), tokenizer=self._tokenizer)
            self.llm.forget()  # its cached prefixes would keep their memory
            self.llm = llm
        self.setup = setup


def load_for_chat(setup: Setup) -> tuple[LoadedModel, Tokenizer]:
    """Load a model and its tokenizer.

    Raises:
        ConfigurationError: the model has no chat template; raised before the weights are read, if they are.
        DraftreeError: as `fetch_and_load`.
    """
    if is_remote(setup.model):  # the session brings the server's tokenizer
        loaded = fetch_and_load(setup)
        return loaded, chat_tokenizer(setup, loaded.folder)
    tokenizer = chat_tokenizer(setup, resolve_with_bar(setup.model))
    return fetch_and_load(setup), tokenizer


def chat_tokenizer(setup: Setup, folder: Path | None) -> Tokenizer:
    """Return the tokenizer of a folder.

    Raises:
        ConfigurationError: it has no chat template.
        ModelLoadError: it cannot be read.
    """
    found = None if folder is None else load_tokenizer(folder, trust_remote_code=setup.trust_remote_code)
    if found is None or not found.has_chat_template:
        raise ConfigurationError(
            f"'{setup.model}' has no chat template, so it cannot chat: continue texts with "
            f"draftree generate {setup.model} 'TEXT', or use a model that is trained for conversations"
        )
    return found


def require_material(methods: Methods, *, has_grammar: bool) -> None:
    """Check that the drafter has something to draft from.

    Raises:
        ConfigurationError: it needs a prediction or a grammar.
    """
    if methods.traits.reads_predictions:
        raise ConfigurationError(
            "drafter 'prediction' drafts from an expected text, which a chat does not have: use ngram or suffix, "
            "or 'draftree generate' with --prediction"
        )
    if methods.traits.reads_grammars and not has_grammar:
        raise ConfigurationError(
            "drafter 'grammar' has nothing to draft from: start the chat with --json-schema, --regex or --grammar, "
            "or use another drafter"
        )
