"""What a command is asked to do: its command line, what ships, and the runs that it plans."""
