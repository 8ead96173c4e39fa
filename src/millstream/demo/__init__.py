"""The demo: a year of real flights through `examples/airline.py`, and a check of every one."""
