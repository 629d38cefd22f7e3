"""Users' own modules: found, imported, checked, and kept with the run."""
