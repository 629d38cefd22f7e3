"""Rows of HumanEval and what two agents may write for them, variant by variant."""

from __future__ import annotations

import ast
import copy
import re

from comlrl.types import Task


class Problem:
    """One row, and the texts of two agents for each variant."""

    def __init__(self, row: dict) -> None:
        self.name = row["entry_point"]
        self.task = Task(row["task_id"], row)
        self.solution = row["prompt"] + row["canonical_solution"]
        functions = [n for n in ast.parse(self.solution).body if isinstance(n, ast.FunctionDef)]
        function = next(f for f in functions if f.name == self.name)
        arguments = ", ".join(a.arg for a in function.args.args)
        self.head = ast.unparse(function).split("\n")[0]
        self.function = function
        self.tuple = f"({arguments},)"
        self.call = f"aux({arguments})"
        self.imports = "\n".join(re.findall(r"^(?:import|from) .*$", row["prompt"], re.MULTILINE))

    def main(self, *first: str) -> str:
        """The solution with statements put before its own."""
        function = copy.deepcopy(self.function)
        start = 1 if ast.get_docstring(function) else 0
        function.body[start:start] = ast.parse("\n".join(first)).body
        return f"{self.imports}\n{ast.unparse(function)}\n"

    def texts(self, variant: str) -> tuple[str, ...]:
        echo = "def aux(*values):\n    '''Hands its arguments on.'''\n    return values\n"
        solved = re.sub(rf"\b{self.name}\b", "aux", self.solution)
        real = self.main(f"values = {self.call}", f"{self.tuple[1:-1]} = values")
        fence = (
            "Sure! Here's the function, don't worry:\n\n```python\n{}\n```\nIt's *done*: `x = (`"
        )
        return {
            "alone": (self.solution,),
            "aux_missing": ("I have no idea, sorry.", self.solution),
            "thin_return": (solved, f"{self.head}\n    '''Doc.'''\n    return {self.call}\n"),
            "thin_assign": (solved, f"{self.head}\n    result = {self.call}\n    return result\n"),
            "real_main": (echo, real),
            "fenced": (fence.format(echo), fence.format(real)),
            "bare_call": (echo, self.main(self.call)),
            "unread_name": (echo, self.main(f"unread = {self.call}")),
            "broken_main": (echo, f"{self.head}\n    return (({self.call}\n"),
            "broken_aux": ("def aux(*values):\n    return ((", real),
            "main_missing": (echo, "I would return something."),
            "main_without_return": (echo, f"{self.head}\n    print({self.call})\n"),
            "wrong_main": (
                echo,
                f"{self.head}\n    {self.call}\n    raise ValueError\n    return 1\n",
            ),
        }[variant]
