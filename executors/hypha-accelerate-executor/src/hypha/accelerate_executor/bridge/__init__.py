"""Client of the worker's job bridge, trace spans, redaction of secrets."""
