"""Configuration of a daemon: models, sources, validation, error positions, template and dump."""
