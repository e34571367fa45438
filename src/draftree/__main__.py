"""`python -m draftree`: the command line."""

from __future__ import annotations

from draftree.cli.main import main

main()
