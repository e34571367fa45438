"""What `docs/build.py` makes pages from: the package's own files and dataclasses."""
