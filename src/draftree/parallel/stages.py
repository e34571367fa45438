"""Stages of a pipeline: each runs its layers, and only the last one the head.

transformers divides the layers and wraps the model's forward so that the last stage sends all logits to the others.
Here rank 0 has the last stage, so logits stay where they are read, and hidden states are all that is sent. The division
is private in transformers: with a version that is not known, its own forward runs, and the logits are sent.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

__all__ = ["KNOWN_VERSIONS", "Stage"]

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("5.23.", "5.24.")
"""Versions of transformers whose division of layers is known."""
PARTS = ("communicate", "pp_is_first_stage", "pp_is_last_stage", "pp_rank", "pp_size")


class Stage:
    """Forward passes through the layers of one stage.

    Args:
        model: a `…ForCausalLM` whose layers transformers has divided.
        version: of transformers.

    Attributes:
        is_own: whether the passes are ours; if not, transformers' own forward runs, which sends the logits.
    """

    def __init__(self, model: Any, version: str) -> None:
        self._model = model
        self._stage: Any = getattr(model, "_pp_stage", None)
        self._whole: Any = getattr(model.forward, "__wrapped__", None)
        is_complete = self._whole is not None and all(hasattr(self._stage, name) for name in PARTS)
        self.is_own = version.startswith(KNOWN_VERSIONS) and is_complete
        if not self.is_own:
            logger.info("stages of transformers %s are not known: every pass sends its logits", version)

    @property
    def sends_logits(self) -> bool:
        """Whether this process gets logits from a pass."""
        return not self.is_own or bool(self._stage.pp_is_last_stage)

    def logits(self, **arguments: Any) -> Tensor | None:
        """Run one pass through all stages.

        Args:
            **arguments: of the model's forward: `input_ids`, `position_ids` and others.

        Returns:
            The logits; None where they are not computed.
        """
        if not self.is_own:
            found: Tensor = self._model(**arguments).logits
            return found
        stage, model = self._stage, self._model
        parameter = next(model.parameters())
        place = {"device": parameter.device, "dtype": parameter.dtype}
        if not stage.pp_is_first_stage:
            tokens = arguments.pop("input_ids")
            shape = (*tokens.shape[:2], model.config.get_text_config().hidden_size)
            arguments["inputs_embeds"] = stage.communicate("recv_forward", shape=shape, **place)
        if stage.pp_is_last_stage:
            own: Tensor = self._whole(**arguments).logits
            return own
        arguments.pop("logits_to_keep", None)
        hidden = getattr(model, model.base_model_prefix)(**arguments).last_hidden_state
        stage.communicate("send_forward", tensor=hidden, **place)
        return None
