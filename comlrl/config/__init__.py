"""Reading of settings (YAML, flags, overrides) into one frozen, typed ``Config``.

Torch is never imported here, so mistakes in a configuration are reported at once.
"""
