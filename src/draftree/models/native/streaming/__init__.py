"""Passes in C whose weights are read from a file layer by layer, within a memory budget."""
