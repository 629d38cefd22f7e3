"""The writers' prompts."""

from __future__ import annotations

CONCISE = """\
{prompt}

Write a concise summary of this post, in one or two sentences. Be brief and factual.
Prose only: no title, no list, no code.
"""
DETAILED = """\
{prompt}

Another writer sums up this post in {shorter}. Write a longer summary, two to three \
times its length.
Say more than it can, in more varied words, and lead from one thought to the next.
Prose only: no title, no list, no code.
"""
REVISION = "Write a revised {role} summary of the post. Prose only: no title, no list, no code.\n"
