"""Endpoints: one module for each API, with its request bodies, its router and the JSON of its responses."""
