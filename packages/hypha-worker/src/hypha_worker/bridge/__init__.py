"""The job bridge: an executor's only access to the network, HTTP on a Unix socket, one socket per job."""
