"""Configuration of a daemon: layers, validation, error positions, template and dump."""
