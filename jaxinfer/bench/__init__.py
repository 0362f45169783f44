"""Traffic replayed against an engine, and what was measured: host code over the public `Engine`."""
