"""Records of first loads, from which later loads start without transformers."""
