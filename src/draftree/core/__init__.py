"""Trees, noise, small types, the registry and errors: what everything else stands on."""
