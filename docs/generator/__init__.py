"""Generators of documentation, used by `docs/build.py`: they read the package's files and dataclasses."""
