"""Shared foundations: token trees, noise, small value types, the method registry and the errors."""
