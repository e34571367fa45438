"""Figures of traces and results files, and the page that plays a trace.

* `base`: what a figure needs (`Material`), its numbers (`Data`), and the base class `Figure`.
* `gallery`: the figures, by what they are about.
* `runs`: the runs of a model that figures need, and their recording as traces.
* `measures`: exact replay of smaller trees on a trace, and estimates with intervals over texts.
* `drawing`: SVG, PNG, PDF and CSV of a figure in one style.
* `results`: figures of results files.
* `playground`: one HTML page that shows a trace round by round.

Invariants: a figure's numbers are data first (`data`, written as CSV) and a drawing second; every figure names what was
measured on what, and a case in which the method loses. matplotlib is imported in `drawing` when a figure is written.
Imported by `cli`.
"""

from __future__ import annotations
