"""Training runs and sweeps."""
