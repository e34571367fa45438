"""The command line: one module per command, with flags derived from dataclasses."""
