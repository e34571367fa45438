"""Records of first loads, which let later loads start without transformers."""
