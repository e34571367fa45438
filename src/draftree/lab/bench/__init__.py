"""Benchmarks: how fast methods write a set of prompts, what passes cost, and what weights lose.

* `methods`: the methods of a benchmark in the user's notation, and transformers' methods for the same job.
* `workload`: prompts from a file, and the later turns of conversations.
* `writers`: the engines under test, ours and transformers.
* `benchmark`: checks, loads, and runs every prompt with every method, interleaved; one record per text.
* `passes`: seconds of passes by rows, and the machine's bandwidth and arithmetic peak as their lower bounds.
* `perplexity`: loss of precision by kind of weights.
* `records`, `summary`, `tables`: results files, their statistics, and their tables.
* `suite`: prompt sets run as one benchmark, with a result that others can check and compare.

Invariants: a results file is raw counts and seconds with the conditions of the run, and is written line by line; every
rate is derived by its reader. Methods alternate prompt by prompt, so that background load affects all of them.
Readers (`records`, `summary`, `tables`) do not import torch. Imported by `cli` and by the other packages of the lab.
"""

from __future__ import annotations
