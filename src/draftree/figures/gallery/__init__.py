"""One figure per file; the file name is the name of the figure."""
