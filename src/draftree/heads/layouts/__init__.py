"""Layouts of folders in which heads are stored, one per file: each is read, and some are written.

A layout is a module. It has `NAME`, `recognise`, `configure` and `tensors`; if heads are written in it, also `values`,
the content of `config.json`. All layouts give the same configuration and the same names of tensors: those of the
parameters of our modules.
"""
