"""Share of a transformers model in one process, with our attention and slots."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.memory import Footprint
from draftree.models.torch.attention import ProbePass
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static.buckets import Shapes
from draftree.parallel.options import ParallelOptions
from draftree.parallel.plans import plans_of_stages
from draftree.parallel.stages import Stage
from draftree.parallel.sums import ordered_sums, require_ordered

__all__ = ["ShardedModel", "ShardedReader", "require_divisible"]


def require_divisible(name: str, config: Any, options: ParallelOptions) -> None:
    """Check that the heads and layers of a model can be divided; loads nothing.

    Args:
        name: name of the model in messages.
        config: its configuration.
        options: the division.

    Raises:
        ConfigurationError: heads or layers cannot be divided, or transformers has no plan for the architecture.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    plan = getattr(text, "base_model_tp_plan", None)
    if options.tp > 1 and not plan:
        raise ConfigurationError(
            f"transformers has no tensor-parallel plan for '{name}' of type '{text.model_type}': use tp=1"
        )
    for what, count in (("key-value heads", kv_heads), ("attention heads", heads)):
        if count % options.tp:
            possible = [size for size in range(1, kv_heads + 1) if not kv_heads % size and not heads % size]
            raise ConfigurationError(
                f"'{name}' has {count} {what}, which cannot be divided evenly among tp={options.tp} processes: "
                f"use tp of {', '.join(map(str, possible))}"
            )
    if options.pp > 1 and not getattr(text, "base_model_pp_plan", None):
        raise ConfigurationError(
            f"transformers cannot divide the layers of '{name}' of type '{text.model_type}' into stages: use pp=1"
        )
    if options.pp > int(text.num_hidden_layers):
        raise ConfigurationError(
            f"'{name}' has {text.num_hidden_layers} layers, fewer than pp={options.pp} stages: use a smaller pp"
        )
    if options.strict_sums:
        require_ordered(list((plan or {}).values()), name)


class ShardedReader:
    """Reads a process's share of a model, in place of a class of transformers.

    Args:
        options: the division.
    """

    def __init__(self, options: ParallelOptions) -> None:
        self._options = options

    def from_pretrained(self, folder: Any, *, trust_remote_code: bool = False, **settings: Any) -> Any:
        """Load the share; arguments and result are those of `AutoModelForCausalLM.from_pretrained`."""
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        division = DistributedConfig(tp_size=self._options.tp, pp_size=self._options.pp)
        loader: Any = AutoModelForCausalLM
        with ExitStack() as changes:
            if self._options.strict_sums:
                changes.enter_context(ordered_sums())
            if self._options.tp > 1 and self._options.pp > 1:
                changes.enter_context(plans_of_stages())
            return loader.from_pretrained(
                folder, distributed_config=division, trust_remote_code=trust_remote_code, **settings
            )


class ShardedModel(HFModel):
    """Share of a transformers model as a `LanguageModel`; its passes are those of all processes together.

    Args:
        model: the share.
        options: the division.
        row_buckets: as for `HFModel`.
        shapes: as for `HFModel`.

    Raises:
        UnsupportedModelError: as for `HFModel`.
    """

    def __init__(
        self, model: Any, options: ParallelOptions, *, row_buckets: Sequence[int] = (), shapes: Shapes | None = None
    ) -> None:
        import transformers

        self._stage = Stage(model, transformers.__version__) if options.pp > 1 else None
        super().__init__(model, row_buckets=row_buckets, shapes=shapes)

    @property
    def footprint(self) -> Footprint:
        """Memory of this share in bytes."""
        local = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in self.model.parameters())
        return replace(super().footprint, weights=sum(one.numel() * one.element_size() for one in local))

    def _require_calls(self, probe: ProbePass, num_layers: int) -> None:
        if self._stage is None:
            super()._require_calls(probe, num_layers)
            return
        if not probe.shapes or not probe.windows_of_calls <= probe.windows_of_masks:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in none of the layers of a stage, or with "
                "other windows than its masks have"
            )

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        if self._stage is None:
            return super()._forward(tokens, positions, rows)
        arguments: dict[str, Any] = {
            "input_ids": tokens.to(self.device),
            "position_ids": positions.to(self.device),
            "use_cache": False,
        }
        if rows is not None and self._rows_keyword:
            arguments["logits_to_keep"] = rows.to(self.device)
        logits = self._stage.logits(**arguments)
        if logits is None:
            return torch.empty(0, self.vocab_size, device=self.device)
        found = logits[0]
        if rows is not None and not self._rows_keyword:
            found = found[rows.to(self.device)]
        return found if found.dtype == torch.float64 else found.float()
