"""Every command of the package, a file each: command line in, exit code out."""
