"""The identify protocol: what peers report of themselves, and asking again."""
