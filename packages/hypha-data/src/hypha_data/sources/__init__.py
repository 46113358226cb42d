"""Readers of the sources that ``prepare`` takes, one module a format; each yields blocks of samples as tensors."""
