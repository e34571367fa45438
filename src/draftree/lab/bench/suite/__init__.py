"""The suite: prompt sets run as one benchmark, whose result others can check and compare.

`run` reads the sets (the shipped prompts, Spec-Bench, HumanEval) and runs or continues them; `submission` makes the
result a JSON document with raw counts of every prompt and the scores that follow from them, and checks such documents;
`comparison` has tables of several submissions and the regression check against a stored one.
"""

from __future__ import annotations
