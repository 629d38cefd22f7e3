"""Packed rows of Llama-like decoders go in, hidden states come out: transformers' numbers, in fewer
and larger operations."""
