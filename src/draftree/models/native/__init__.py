"""Passes in C for decoders of the usual architecture; all others run through torch."""
