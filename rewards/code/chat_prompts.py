"""Prompts of the code domain for models with a chat template.

Such models answer as assistants do: with prose, examples and the whole solution. Their answers are
therefore begun for them, with a fence and the first line of the function that is theirs
(``PREFILL``). `benchmarks/prompts_table.py` compares these words with others.
"""

from __future__ import annotations

HELPER = """\
```python
{problem}
```
This function will call a helper, `{name}({arguments})`, for a part of the work. Write that \
helper, and not `{entry_point}`. Answer with one short Python function and nothing else:
```python
{start}
```
"""

MAIN = """\
```python
{problem}
```
Write this function. {helpers} already for a part of the work: call {them}, do the rest with what \
comes back, and do not define {them}. Answer with one short Python function and nothing else:
```python
{start}
{calls}
    # the rest of the work, with part
```
"""

SINGLE = """\
```python
{problem}
```
Write this function. Answer with one short Python function and nothing else:
```python
{start}
```
"""

HELPER_AGAIN = """\
Write the helper `{name}`, and not `{entry_point}`. Answer with one short Python function and \
nothing else:
```python
{start}
```
"""

MAIN_AGAIN = """\
Write `{entry_point}`. {helpers}, as above: call {them}, and do not define {them}. Answer with one \
short Python function and nothing else:
```python
{start}
```
"""

REVISION = """\
Write a better `{name}`. Answer with one short Python function and nothing else:
```python
{start}
```
"""

DIVIDING_HELPER = """\
```python
{problem}
```
{division} Write `{name}` only, one short Python function:
```python
{start}
```
"""

DIVIDING_MAIN = """\
```python
{problem}
```
{division} Write `{name}` only, one short Python function:
```python
{opening}
```
"""

# Main's answers begin with its calls: a small model else does the whole work by itself.
DIVIDING_PREFILL = "```python\n{opening}"

# How every answer starts: in a block of code, with the line that the agent's function begins with.
PREFILL = "```python\n{start}"
