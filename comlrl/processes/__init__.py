"""Several processes as one: who has which part, sums over all, models split over them.

With one process every function is the identity.
"""
