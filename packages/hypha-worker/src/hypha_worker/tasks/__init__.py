"""Tasks of any executor on leases: their definitions, resources, runs and stored outputs."""
