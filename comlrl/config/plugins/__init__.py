"""Users' own modules: importing, checking, and storing them with the run."""
