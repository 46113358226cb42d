"""How fast Hypha's network is, beside what the same machine does without it. See README.md in this folder."""
