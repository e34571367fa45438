"""Real weights: what can be had from package registries, how it is fetched, and how it becomes a plain model folder."""
