"""Training of drafters from the target's own texts: data, losses, loops, evaluation, plots and export."""
