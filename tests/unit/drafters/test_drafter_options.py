"""Options of drafters that are out of range are refused by name, before any weights are read."""

from __future__ import annotations

import pytest

from draftree.core.errors import ConfigurationError
from draftree.drafters import DRAFTERS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ngram,min=0", "min=0"),
        ("ngram,max=1", "max=1"),
        ("ngram,min=3,max=2", "min=3"),
        ("ngram,k=0", "k of drafter 'ngram' is 0"),
        ("suffix,min=0", "min=0"),
        ("suffix,min=3,max=2", "max not below min"),
        ("suffix,max=65", "max=65"),
        ("suffix,k=0", "k of drafter 'suffix' is 0"),
        ("suffix,nodes=0", "nodes of drafter 'suffix' is 0"),
        ("suffix,width=0", "width of drafter 'suffix' is 0"),
        ("suffix,floor=1.5", "floor of drafter 'suffix' is 1.5"),
        ("suffix,memory=-1", "memory of drafter 'suffix' is -1"),
        ("prediction,nodes=0", "nodes of drafter 'prediction' is 0"),
        ("prediction,max=99", "max of drafter 'prediction' is 99"),
        ("prediction,floor=-0.1", "floor of drafter 'prediction' is -0.1"),
        ("lookahead,window=-1", "window=-1"),
        ("lookahead,n=1", "n=1"),
        ("lookahead,candidates=0", "candidates=0"),
        ("lookahead,random=-1", "random=-1"),
        ("lookahead,window=240,n=6", "1024"),
        ("lookahead,random=1100", "1024"),
        ("synthetic,accept=1.2", "accept of drafter 'synthetic' is 1.2"),
        ("synthetic,accept=-0.1", "accept of drafter 'synthetic' is -0.1"),
        ("synthetic,k=0", "k=0"),
        ("synthetic,width=0", "width=0"),
        ("synthetic,k=120,width=9", "k=120 and width=9"),
    ],
)
def test_options_out_of_range_are_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DRAFTERS.configure(DRAFTERS.parse(options)[0])
