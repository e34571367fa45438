"""Random decisions and probability ratios shared by verification rules."""
