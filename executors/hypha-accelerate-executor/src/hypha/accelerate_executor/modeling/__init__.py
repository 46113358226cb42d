"""Loading, creating and evaluating models."""
