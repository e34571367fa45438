"""The fleet simulator: how many devices serve a rate of requests, and how long requests take.

* `curves`: seconds of a pass, measured or from data sheets.
* `simulation`: requests, replicas that step like the engine, the host's interpreter, the network, and the event queue.
* `measured`: a measured server: its passes, recorded rounds, and the costs of its host from calibration runs.
* `sizing`: the smallest fleet for a demand.

Invariants: the simulator shares the engine's own rules (prefill budget, wait for client drafts), replays recorded
rounds, and fits no constant to the latencies that it predicts. No torch. Imported by `cli` and by benchmarks.
"""

from __future__ import annotations
