"""Sampling by vLLM servers: their replies, one server, several, the agents' adapters on them."""
