"""Lookup of continuations in earlier text.

`occurrences` indexes the runs of tokens in texts and finds those that match the end of a text; `counting` grows a tree
of the continuations, weighted by the lengths of the matches, and is the base class of drafters that do so.

Invariant: the index changes no token: what it returns are tokens that followed a match. Methods in `drafters` import
it.
"""
