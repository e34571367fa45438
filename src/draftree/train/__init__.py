"""Training of drafters: data from the target's own texts, losses, loops, evaluation and export."""
