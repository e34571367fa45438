"""The lab: everything that measures, explains and compares, and that decoding does without.

* `bench`: benchmarks of methods, passes and weights, and the suite of prompt sets.
* `analysis`: closed forms, and recorded traces under other planners.
* `figures`: figures of traces and results files, and the page that plays a trace.
* `fleet`: the simulator of many clients and servers, and the sizing of a fleet.
* `tune`: the search for the fastest drafter of a model on this machine.
* `doctor`: how a model runs on this machine, and why.

Invariants: nothing but `cli` imports the lab (a contract in `pyproject.toml`), so a model is served without it. What
the lab and others share is elsewhere: traces in `engine.trace`, the options of a command in `execution`, provenance in
`loading.provenance`. The lab records raw counts and seconds; rates are derived by whoever reads them.
"""
