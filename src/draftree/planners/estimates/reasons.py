"""Reason for a plan, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.planners.estimates.drafting import PartPlan

WORTH_SAYING = 0.001
"""Minimum cost of an unread token, in passes, for mention."""


def sentence(plans: Sequence[PartPlan], curve: Sequence[float], batch: int, *, now: int) -> str:
    """Return the cost and the gain of each drafter, and the decision.

    Args:
        plans: of all drafters.
        curve: seconds of a pass by rows.
        batch: sequences of a round.
        now: number of the round.
    """
    return "; ".join(_of(plan, curve, batch, is_alone=len(plans) == 1, now=now) for plan in plans)


def _of(plan: PartPlan, curve: Sequence[float], batch: int, *, is_alone: bool, now: int) -> str:
    name = "" if is_alone or not plan.part.name else f"{plan.part.name}: "
    if plan.costs.call is None:
        return f"{name}nothing has been drafted yet"
    plain = curve[batch]
    row = (curve[min(batch + 1, len(curve) - 1)] - plain) / plain
    gains = (plan.sampled if plan.is_sampled else plan.levels).expected(now)
    if plan.is_cheap(plain, batch):
        cost = plan.costs.call if plan.part.runs_model else plan.sequence_seconds or 0.0
        state = "off, tried at growing intervals" if plan.depth == 0 or plan.is_trial else "on"
        return (
            f"{name}a draft costs {cost / plain:.3f} of a target pass, so its tree is judged afterwards; "
            f"a further node costs {row:.3f}, and scored nodes add {sum(gains):.2f} tokens a round: {state}"
        )
    level = plan.costs.of(1, otherwise=plan.costs.call) / plain
    break_even = (plan.level_seconds(curve, batch)[0]) / plain
    state = "off" if plan.depth == 0 or plan.is_trial else f"{plan.depth} level{'s' if plan.depth > 1 else ''}"
    unread = plan.costs.unread_token / plain
    reading = f", an unread token {unread:.3f}" if unread >= WORTH_SAYING else ""
    return (
        f"{name}a draft level costs {level:.2f} of a target pass{reading}; break-even acceptance {break_even:.2f}; "
        f"measured {gains[0]:.2f}: {state}"
    )
