"""Chat templates: rendering in a sandbox, cost limits, literal messages."""
