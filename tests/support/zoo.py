"""Tiny random models of every causal family that transformers can make, and what the drop-in makes of each.

Not a test itself. `python tests/support/zoo.py [FAMILY ...]` sweeps over all of them, greedily, one prompt and a padded
batch, and prints for each whether the tokens are those of `generate`, the message of the refusal, or how it failed.
The exit status is 1 if a text differs or an error is none of Draftree's.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import draftree
from draftree.core.errors import DraftreeError
from dropin_samples import padded, plain
from families import COMMON, ENCODERS, FAMILIES, _fill
from families import REFUSED as REFUSED_FAMILIES
from zoo_sizes import CHANGES, LATENT, SIZES, UNMADE

MOST_PARAMETERS = 4_000_000
SAME, REFUSED, DIFFERENT, CRASHED, NOT_MADE = "same", "refused", "different", "crashed", "not made"


@dataclass(frozen=True, slots=True)
class Result:
    """The result for one family: one of the outcomes above, and its message."""

    family: str
    outcome: str
    words: str = ""


def all_families() -> list[str]:
    """Those of transformers with a causal model, by model type."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str) -> Any:
    """A configuration with all sizes small."""
    if family in FAMILIES.keys() - ENCODERS.keys() - REFUSED_FAMILIES.keys():
        return AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | CHANGES.get(family, {})))
    return _shrunk(AutoConfig.for_model(family), CHANGES.get(family, {}))


def _shrunk(base: Any, changes: dict[str, Any]) -> Any:
    """A configuration of the same class with small sizes, nested ones included; `changes` are nested as they are."""
    renamed = getattr(type(base), "attribute_map", {})
    names = {renamed.get(name, name): value for name, value in SIZES.items() if _has(base, name)}
    chosen = {name: value for name, value in names.items() if name == "pad_token_id" or _is_set(base, name)}
    if _has(base, "qk_rope_head_dim"):
        chosen |= LATENT
    chosen |= {"eos_token_id": None, "tie_word_embeddings": False}
    for name in getattr(type(base), "sub_configs", {}):
        nested = getattr(base, name, None)
        if isinstance(nested, PreTrainedConfig):
            chosen[name] = _shrunk(nested, changes.get(name, {}))
            changes = {key: value for key, value in changes.items() if key != name}
    return type(base)(**(chosen | changes))


def _has(base: Any, name: str) -> bool:
    if isinstance(getattr(type(base), name, None), property):
        return False
    try:
        return hasattr(base, name)
    except Exception:  # a property for one layer only
        return False


def _is_set(base: Any, name: str) -> bool:
    optional = ("sliding_window", "head_dim", "q_lora_rank")
    return name not in optional or getattr(base, name, None) is not None


def tiny_model(family: str) -> Any:
    """A tiny model of the family, always with the same weights.

    Raises:
        ValueError: its sizes go by other names, and it would be large.
    """
    config = tiny_config(family)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    count = sum(parameter.numel() for parameter in shape.parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model)
    return model.eval()


def compare(family: str, *, draft: str = "ngram,min=1") -> Result:
    """Tokens of the drop-in compared with those of `generate`: one prompt, and a batch with padding."""
    if family in UNMADE:
        return Result(family, NOT_MADE, UNMADE[family])
    try:
        model = tiny_model(family)
        batches = [padded(14), padded(14, 9, 3)]
        wanted = [plain(model, inputs) for inputs in batches]
    except Exception as error:  # no tiny model, or one that transformers itself cannot run
        return Result(family, NOT_MADE, _words(error))
    words = ""
    for inputs, tokens in zip(batches, wanted, strict=True):
        try:
            got = plain(model, inputs, custom_generate=draftree.generate, draft=draft)
        except DraftreeError as error:
            return Result(family, REFUSED, f"batch of {len(tokens)}: {error}")
        except Exception as error:
            return Result(family, CRASHED, _words(error))
        if torch.equal(got, tokens):
            continue
        # the cache of some families changes their text under generate itself
        if not torch.equal(got, plain(model, inputs, use_cache=False)):
            return Result(family, DIFFERENT, f"batch of {len(tokens)}")
        words = f"batch of {len(tokens)}: as generate writes it without its cache, with which it differs"
    return Result(family, SAME, words)


def _words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def main(families: list[str]) -> int:
    """Sweep over these families, or all; 1 if one differs or crashes."""
    counts: Counter[str] = Counter()
    for family in families or all_families():
        with contextlib.redirect_stderr(None):
            result = compare(family)
        counts[result.outcome] += 1
        print(f"{result.outcome:<10} {family:<26} {result.words}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return int(bool(counts[DIFFERENT] or counts[CRASHED]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
