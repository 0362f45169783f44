"""What traffic through an engine costs, and what XLA made of a program."""
