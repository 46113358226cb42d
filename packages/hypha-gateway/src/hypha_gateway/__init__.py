"""Bootstrap, relay and DHT anchor of a Hypha network."""
