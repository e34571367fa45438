"""Weights: the models in package registries, their download, and conversion to plain model folders."""
