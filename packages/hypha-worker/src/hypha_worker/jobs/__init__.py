"""Jobs dispatched under leases, from acceptance to clean-up."""
