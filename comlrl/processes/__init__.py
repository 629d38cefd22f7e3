"""Distributed processes: shards, collective calls and statistics; CPU cores and threads."""
