"""Prompts of the code domain for models with a chat template.

Such models tend to answer with prose, examples and the whole solution. Their answers are therefore
prefilled with a fence and the first line of the function that the agent is to write (``PREFILL``).
`benchmarks/prompts_table.py` compares these prompts with others.
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

# Main's answers begin with its calls, because otherwise a small model does all the work itself.
DIVIDING_PREFILL = "```python\n{opening}"

# The start of every answer: a code block with the first line of the agent's function.
PREFILL = "```python\n{start}"
