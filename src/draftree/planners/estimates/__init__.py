"""Estimates of acceptance and cost for planners."""
