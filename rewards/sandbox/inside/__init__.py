"""The code that runs inside the sandbox, which is passed as source, and the wire format."""
