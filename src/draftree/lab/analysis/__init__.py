"""What recorded runs and closed forms tell, without a model and without torch.

* `theory`: acceptance and speed-up in closed form, for comparison with measurements.
* `simulation`: a recorded trace under another planner, the upper bound for any planner, and rank hits.
* `export`: a trace as a timeline and as a summary.

Traces themselves are written and read by `draftree.engine.trace`. Imported by `cli`, `lab.figures` and benchmarks.
"""

from __future__ import annotations
