"""Passes in C, for decoders that are built as most are; everything else runs through torch."""
