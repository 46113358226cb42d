"""The executor's only door to the network: HTTP on a Unix socket, one socket a job."""
