"""Fast forward passes of Llama-like decoders over packed rows: the results of transformers, in
fewer and larger operations."""
