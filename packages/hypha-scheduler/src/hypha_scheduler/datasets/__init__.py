"""The dataset of a job and the data nodes that provide it."""
