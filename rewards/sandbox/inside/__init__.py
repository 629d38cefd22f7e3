"""What runs inside the sandbox, handed over as source, and the format that both sides speak."""
