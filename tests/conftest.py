"""The fixtures of the whole suite come from `millstream.testing.plugin`, installed as a pytest plugin."""

pytest_plugins = ["pytester"]
