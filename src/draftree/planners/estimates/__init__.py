"""Estimates that planners and simulations share."""
