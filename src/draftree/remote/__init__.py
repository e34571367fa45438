"""A target on another machine: the device drafts and sends tokens, the server verifies and returns the path."""
