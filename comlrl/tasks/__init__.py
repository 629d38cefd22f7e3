"""A data set's name goes in, tasks come out; and what an agent reads, at turn 1 and later."""
