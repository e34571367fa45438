"""No file of the package imports itself through others, inside functions included."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_circle_of_files() -> None:
    graph = grimp.build_graph("draftree", exclude_type_checking_imports=True, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    assert len(list(order.static_order())) == len(graph.modules)  # a circle raises CycleError with its files
