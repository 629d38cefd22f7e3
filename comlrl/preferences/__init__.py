"""Joint candidates of tasks go in; preference pairs, and a joint reward model, come out."""
