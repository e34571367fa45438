"""The error of training."""

from __future__ import annotations

from draftree.core.errors import DraftreeError

__all__ = ["TrainingError"]


class TrainingError(DraftreeError, RuntimeError):
    """Training cannot start or continue: damaged data, a loss that is not finite, or too little memory."""
