"""Trained heads that come with the package: one folder for each target, named after it."""
