"""The algorithms, one a file: when things happen. A trainer's docstring is its objective."""
