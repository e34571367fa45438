"""Random decisions and probability ratios shared by verifiers."""
