from __future__ import annotations

import pytest

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw


@pytest.mark.parametrize(
    ("draft", "verify", "draw"),
    [
        ("ngram", "coupled", Draw.FREE),
        ("ngram", "token", Draw.POINT),
        ("model:x", "coupled", Draw.FREE),
        ("model:x", "token", Draw.IID),
        ("model:x", "soft", Draw.IID),
        ("model:x,tree=2-2", "soft", Draw.FREE),
        ("model:x,tree=wor-2-2", "coupled", Draw.WITHOUT_REPLACEMENT),
        ("ngram+model:x", "coupled", Draw.FREE),
        ("ngram+model:x", "multistep", Draw.IID),
        ("ngram+model:x,tree=wor-2-2", "coupled", Draw.FREE),
        ("ngram+model:x,tree=iid-2-2", "coupled", Draw.FREE),
        ("ngram+model:x,tree=iid-2-2", "traversal", Draw.IID),
        ("ngram,min=1 + model:x", "multistep", Draw.IID),
    ],
)
def test_drafter_and_verifier_agree_on_a_draw(draft: str, verify: str, draw: Draw) -> None:
    assert choose_methods(draft, verify, None).draw is draw


@pytest.mark.parametrize(
    ("draft", "verify", "plan", "message"),
    [
        (None, "coupled", "fixed:3", "no drafter"),
        ("none", "coupled", "heuristic", "no drafter"),
        ("none,k=3", "coupled", None, "takes no options"),
        ("none+ngram", "coupled", None, "takes no options"),
        ("ngram", "coupled+token", None, "names 2 methods"),
        ("ngrm", "coupled", None, "did you mean 'ngram'"),
        ("ngram", "couple", None, "did you mean 'coupled'"),
        ("ngram", "coupled", "fix", "did you mean 'fixed'"),
        ("ngram,mx=3", "coupled", None, "did you mean 'max'"),
        ("ngram,max=x", "coupled", None, "whole number"),
        ("ngram,max=1", "coupled", None, "max not below min"),
        ("model", "coupled", None, "needs name"),
        ("ngram", "coupled", "fixed:-1", "from 0 to 1024"),
        ("ngram", "coupled", "fixed:1025", "from 0 to 1024"),
        ("ngram", "coupled", "additive,start=0", "from 1 to 1024"),
        ("ngram", "coupled", "heuristic,start=3000", "from 1 to 1024"),
        ("ngram", "coupled", "threshold,k=3000", "from 1 to 1024"),
        ("ngram", "coupled", "adaptive,memory=nan", "at least 1"),
        ("ngram", "coupled", "", "empty planner"),
        ("ngram,k=100000000000", "coupled", None, "from 1 to 1024"),
        ("grammar,k=1025", "coupled", None, "from 1 to 1024"),
        ("model:x,k=100000000000", "coupled", None, "from 1 to 1024"),
        ("model:x,tree=16-16-16", "coupled", None, "4368 nodes: 1024 fit in a pass"),
        ("model:x,tree=256-256-256-256", "coupled", None, "1024 fit in a pass"),
        ("model:x,tree=2-2", "multistep", None, "iid"),
        ("ngram+model:x", "token", None, "chains"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    draft: str | None, verify: str, plan: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        choose_methods(draft, verify, plan)
    assert "\n" not in str(caught.value)
