"""Tasks go in, scored trees come out; behind it the samplers that turn prompts into completions."""
