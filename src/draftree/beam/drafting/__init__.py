"""Drafters of a beam search: guesses of the next beams of a text, which one pass scores together."""
