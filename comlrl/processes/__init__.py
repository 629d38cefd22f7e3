"""What one process has goes in, what all of them have comes out: parts, sums, models split over
them. With one process every function is the identity.
"""
