"""The command line: one file per family of commands, wired together by `millstream.cli.main`."""
