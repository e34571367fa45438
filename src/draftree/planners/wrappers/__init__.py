"""Planners that wrap others. They have no specs of their own."""
