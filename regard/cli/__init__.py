"""The command line: one module a group of commands, which imports nothing heavy until a command runs."""
