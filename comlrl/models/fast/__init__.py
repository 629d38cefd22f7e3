"""The fast way through Llama-like decoders: same numbers, in fewer and larger operations."""
