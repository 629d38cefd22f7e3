"""Joint programs and their tests go in, test outcomes come out; docs/sandbox.md has the levels."""
