"""Decides where work runs: plans, and pure arithmetic on them. No torch and no I/O beyond JSON."""
