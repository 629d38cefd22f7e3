"""The package's commands, one per file. Each maps a command line to an exit code."""
