"""Calls of functions: their definitions in a request, their formats by model family, and their parsing.

`ToolPlan` says what the tools of a request do to its prompt, its sampling parameters and its answer. `families` has the
formats and the grammars that force calls, `parser` reads calls from a growing text. Any split of a text gives the same
calls and the same text; a text that is no call by the time its arguments begin stays text.
"""
