"""Layouts of folders in which heads are stored, one per file."""
