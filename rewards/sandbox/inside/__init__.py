"""The code that runs inside the sandbox, passed as source, and the wire format."""
