"""What the agents of the code domain read where their models have a chat template.

Such models answer as assistants do: with fences, prose, examples and the whole solution. They are
shown how the answer starts, which small ones follow better than a list of what not to write.
`benchmarks/prompts_table.py` compares these words with others.
"""

from __future__ import annotations

HELPER = """\
{problem}

Another programmer writes `{entry_point}`. You write one small helper function for it, named \
`{name}`. Do not write `{entry_point}`.
Your answer must start with `def {name}(` and end with a `return`:
```python
def {name}(
```
"""

MAIN = """\
{problem}

Write `{entry_point}`. {available}: call {them}, and do not define {them}.
Your answer must start with this and end with a `return`:
```python
{signature}
{calls}
```
"""

SINGLE = """\
{problem}

Write `{entry_point}`.
Your answer must start with this and end with a `return`:
```python
{signature}
```
"""

HELPER_AGAIN = """\
Write one small helper function, named `{name}`.
Your answer must start with `def {name}(` and end with a `return`:
```python
def {name}(
```
"""

MAIN_AGAIN = """\
Write `{entry_point}`. {available}, as above: call {them}, and do not define {them}.
Your answer must start with this and end with a `return`:
```python
{signature}
```
"""

REVISION = """\
Write a better `{name}`.
Your answer must start with `def {name}(` and end with a `return`:
```python
def {name}(
```
"""
