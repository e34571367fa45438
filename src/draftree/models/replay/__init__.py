"""A target that replays recorded texts without passes."""
