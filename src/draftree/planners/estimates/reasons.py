"""Why a plan is as it is, in numbers a reader can check."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.planners.estimates.drafting import PartPlan

WORTH_SAYING = 0.001


def sentence(plans: Sequence[PartPlan], curve: Sequence[float], batch: int) -> str:
    """What each drafter costs and brings, and what follows.

    Args:
        plans: of all drafters.
        curve: seconds of a pass by rows.
        batch: sequences that are written at once.
    """
    return "; ".join(_of(plan, curve, batch, is_alone=len(plans) == 1) for plan in plans)


def _of(plan: PartPlan, curve: Sequence[float], batch: int, *, is_alone: bool) -> str:
    name = "" if is_alone or not plan.part.name else f"{plan.part.name}: "
    if plan.costs.call is None:
        return f"{name}nothing was drafted yet"
    plain = curve[batch]
    row = (curve[min(batch + 1, len(curve) - 1)] - plain) / plain
    gains = plan.levels.expected()
    if plan.is_instant(curve[1]):
        state = "rests, tried again now and then" if plan.depth == 0 or plan.is_probe else "on"
        return (
            f"{name}a draft costs {plan.costs.call / plain:.3f} of a target pass, so it is made before it is judged; "
            f"a node more costs {row:.3f}, and what is scored brings {sum(gains):.2f} tokens a round: {state}"
        )
    level = plan.costs.of(1, otherwise=plan.costs.call) / plain
    break_even = (plan.level_seconds(curve, batch)[0]) / plain
    state = "off" if plan.depth == 0 or plan.is_probe else f"{plan.depth} level{'s' if plan.depth > 1 else ''}"
    unread = plan.costs.unread / plain
    reading = f", a token that it has not read yet {unread:.3f}" if unread >= WORTH_SAYING else ""
    return (
        f"{name}a draft level costs {level:.2f} of a target pass{reading}; break-even acceptance {break_even:.2f}; "
        f"measured {gains[0]:.2f}: {state}"
    )
