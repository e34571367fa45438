"""The command line: one module for each command, flags derived from the dataclasses that they set."""
