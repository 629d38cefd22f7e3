"""Token rows with their credit go in; losses, gradients and optimizer steps come of them."""
