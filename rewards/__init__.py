"""A joint action goes in, a score comes out; model-written code runs in the sandbox alone."""
