"""Endpoints, one router per file."""
