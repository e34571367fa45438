"""Estimates of acceptance and cost that planners decide by."""
