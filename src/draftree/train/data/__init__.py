"""Training data: texts of the target with its hidden states, captured while they are generated."""
