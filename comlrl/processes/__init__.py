"""Several processes as one: shards, sums, and models split over them. With one process every
function is the identity.
"""
