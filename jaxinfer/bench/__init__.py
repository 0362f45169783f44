"""Traffic replayed against an engine, programs as XLA compiled them: what was measured of them."""
