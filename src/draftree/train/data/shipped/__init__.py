"""Prompts of our own writing that come with the package, and templates that multiply them."""
