"""Reports on run directories: self-contained HTML pages, and figures."""
