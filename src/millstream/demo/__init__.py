"""The demo: processes a year of real flights with `examples/airline.py`, and checks every one."""
