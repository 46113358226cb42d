"""Jobs dispatched under leases, from acceptance to clean-up, and the interface to the executors that run them."""
