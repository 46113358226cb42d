"""What runs a job: a process that trains, or the parameter server."""
