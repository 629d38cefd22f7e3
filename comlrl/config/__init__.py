"""Settings (YAML, flags, overrides) go in; one frozen, typed ``Config`` comes out.

Torch is never imported here: a mistake in a configuration is answered at once.
"""
