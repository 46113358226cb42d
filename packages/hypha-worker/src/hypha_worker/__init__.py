"""The worker: bids for work, holds resources under leases, and runs Hypha jobs through executors."""
