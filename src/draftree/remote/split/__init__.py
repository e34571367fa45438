"""A target split by layers: the device runs the first layers and sends hidden states, the server runs the others."""
