"""What happens around training steps: cadences, checkpoints, run directory, interrupts, summary."""
