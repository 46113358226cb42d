"""The strategy ``inference``: a model applied to every row of a dataset, each row counted once."""
