"""Replicas of the server under Ray Serve. Needs the extra `ray`; the module `prefixes` and the proxy do not."""
