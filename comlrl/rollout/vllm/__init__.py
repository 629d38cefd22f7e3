"""Sampling by vLLM servers: processes, clients, replies, and the agents' adapters."""
