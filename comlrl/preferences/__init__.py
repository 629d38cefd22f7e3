"""Makes preference pairs, and a joint reward model, from joint candidates of tasks."""
