"""What the agents of the code domain read where their models have a chat template.

Such models answer as assistants do: with fences, prose, examples and the whole solution. They
are shown how the answer starts, which small ones follow better than a list of what not to write;
and helper and main are shown one call, with the entry point's own arguments.
`benchmarks/prompts_table.py` has the wordings that were tried.
"""

from __future__ import annotations

HELPER = """\
```python
{problem}
```
This function will call a helper, `{name}({arguments})`, for a part of the work. Write that \
helper, and not `{entry_point}`. Answer with one short Python function and nothing else:
```python
def {name}({parameters}):
```
"""

MAIN = """\
```python
{problem}
```
Write this function. {helpers} already: call {them}, and do not define {them}. Answer with one \
short Python function and nothing else:
```python
{signature}
{calls}
```
"""

SINGLE = """\
```python
{problem}
```
Write this function. Answer with one short Python function and nothing else:
```python
{signature}
```
"""

HELPER_AGAIN = """\
Write the helper `{name}`. Answer with one short Python function and nothing else:
```python
def {name}(
```
"""

MAIN_AGAIN = """\
Write `{entry_point}`. {helpers}, as above: call {them}, and do not define {them}. Answer with one \
short Python function and nothing else:
```python
{signature}
```
"""

REVISION = """\
Write a better `{name}`. Answer with one short Python function and nothing else:
```python
def {name}(
```
"""
