"""A run directory goes in; a page that opens without network, and figures, come out."""
