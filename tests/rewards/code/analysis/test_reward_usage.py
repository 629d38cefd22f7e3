"""How main uses the helpers: calls, values handed on, results that nothing reads, names."""

from __future__ import annotations

import pytest

from rewards.code.analysis.extraction import extract
from rewards.code.analysis.usage import main_use


def use(source: str, helpers=("aux",)):
    return main_use(extract(source).by_name()["f"], helpers)


def test_calls():
    assert use("def f(x):\n    return [aux(y) for y in x]").called == ("aux",)
    assert use("def f(x):\n    return len(aux)").called == ()
    assert use("def f(x):\n    '''aux(x)'''\n    return x  # aux(x)").called == ()
    assert use("def f(x):\n    return x.aux(x)").called == ()
    assert use("def f(aux):\n    return aux(1)").called == ()  # its own parameter
    assert use("def f(x):\n    def aux(y):\n        return y\n    return aux(x)").called == ()


def test_wrappers():
    wrappers = [
        "return aux(x)",
        "'''Doc.'''\n    return aux(x)",
        "return sorted(aux(x))[0] + 1",
        "y = aux(x)\n    return y",
        "y: int = aux(x)\n    return y",
        "return sorted(x, key=aux)",
        "return aux",
        "return list(map(lambda v: aux(v), x))",
        "y = list(map(aux, x))\n    return y",
        "y = next(iter(list(map(aux, [x]))))\n    return y",
        "y = (g := aux)(x)\n    return y",
        "y = list(map(aux, x))[0]\n    return y",
    ]
    others = [
        "y = aux(x)\n    return y + 1",
        "y = aux(x) + 1\n    return y",
        "y = aux(x)\n    return x",
        "if x:\n        return aux(x)\n    return 1",
        "x = x + 1\n    return aux(x)",
        "return x",
        "y = sorted(aux(x))\n    return y",
        "y = list(map(aux, x))\n    return y[0]",
    ]
    assert all(use(f"def f(x):\n    {body}").wrapper for body in wrappers)
    assert not any(use(f"def f(x):\n    {body}").wrapper for body in others)


def test_ignored_results():
    ignored = [
        "aux(x)\n    return x",
        "y = aux(x)\n    return x",
        "_ = aux(x)\n    return x",
        "a, b = aux(x)\n    return x",
        "y: int = aux(x)\n    return x",
        "y = z = aux(x)\n    return x",
        "[aux(x)]\n    return x",
        "_ = [aux(x)]\n    return x",
        "(y := aux(x))\n    return x",
        "aux(x)\n    return aux(x)",  # one bare call is enough
    ]
    read = [
        "y = aux(x)\n    return y + 1",
        "a, b = aux(x)\n    return b",
        "print(aux(x))\n    return x",
        "x[0] = aux(x)\n    return x",
        "x.append(aux(x))\n    return x",
        "y = aux(x)\n    def g():\n        return y\n    return g()",
        "if aux(x):\n        return 1\n    return 2",
    ]
    assert all(use(f"def f(x):\n    {body}").ignored == ("aux",) for body in ignored)
    assert not any(use(f"def f(x):\n    {body}").ignored for body in read)


@pytest.mark.parametrize(
    "body",
    [
        "from math import floor as aux\n    return aux(x)",
        "import math as aux\n    return aux(x)",
        "import aux\n    return aux(x)",
        "try:\n        pass\n    except ValueError as aux:\n        pass\n    return aux(x)",
        "aux = abs\n    return aux(x)",
        "aux: object = abs\n    return aux(x)",
        "aux += 1\n    return aux(x)",
        "(a, *aux), b = (1, 2), 3\n    return aux(x)",
        "[aux := abs for _ in [1]]\n    return aux(x)",
        "for aux in [abs]:\n        pass\n    return aux(x)",
        "with open(x) as aux:\n        pass\n    return aux(x)",
        "class aux:\n        pass\n    return aux(x)",
        "def aux(y):\n        return y\n    return aux(x)",
        "match x:\n        case [1, *aux]:\n            return aux(x)",
        "match x:\n        case {1: 2, **aux}:\n            return aux(x)",
        "match x:\n        case int() as aux:\n            return aux(x)",
        "global aux\n    aux = abs\n    return aux(x)",
        "def g():\n        global aux\n        aux = abs\n    g()\n    return aux(x)",
        "def g(aux):\n        return aux(x)\n    return g(abs)",
        "return [aux(x) for aux in [abs]][0]",
        "return (lambda aux: aux(x))(abs)",
        "del aux\n    return aux(x)",
        "def g():\n        nonlocal aux\n        aux = abs\n    aux = 1\n    return aux(x)",
    ],
)  # fmt: skip
def test_a_name_that_main_binds_is_no_helper(body):
    assert use(f"def f(x):\n    {body}\n").called == ()


@pytest.mark.parametrize(
    "body",
    [
        "y = [aux for aux in [1]]\n    return aux(x) + y[0]",  # a comprehension's own
        "y = (lambda aux: 1)(2)\n    return aux(x) + y",
        "def g(aux):\n        return 1\n    return aux(x) + g(2)",
        "class A:\n        aux = 1\n        def g(s):\n            return aux(x)\n    return A()",
        "global aux\n    return aux(x)",
        "def g():\n        return aux(x)\n    return g()",
        "return f'{aux(x)}'",
    ],
)  # fmt: skip
def test_a_name_bound_elsewhere_is(body):
    assert use(f"def f(x):\n    {body}\n").called == ("aux",)


@pytest.mark.parametrize(
    "body",
    [
        "y = list(map(aux, x))\n    return y[0]",
        "y = sorted(x, key=aux)\n    return y + [1]",
        "x.sort(key=aux)\n    return x",
        "g = aux\n    y = g(x)\n    return y + 1",
        "g = aux\n    return list(map(g, x))",
        "for g in (aux, abs):\n        x = g(x)\n    return x",
        "table = {'a': aux}\n    return table['a'](x)",
        "import functools\n    return functools.reduce(aux, x)",
        "def g(h=aux):\n        return h(x)\n    return g()",
        "x.append(aux)\n    return x",
        "x.f = aux\n    return x",
        "y = [aux for _ in x]\n    return y[0](x)",
        "(f,) = (aux,)\n    y = f(x)\n    return y + 1",
        "f = [aux, abs][0]\n    return f(x) + 1",
    ],
)
def test_a_helper_handed_on_is_used(body):
    found = use(f"def f(x):\n    {body}\n")
    assert (found.called, found.ignored, found.wrapper) == (("aux",), (), False)


@pytest.mark.parametrize(
    "body",
    ["g = aux\n    return x", "aux\n    return x", "print(aux)\n    return x",
     "if aux:\n        return x\n    return 1", "return aux.__name__", "(aux, 1)\n    return x",
     "return [y for y in x if aux]", "return x[aux]", "return not aux", "return f'{aux}'",
     "for _ in x:\n        g = aux\n        g = x\n    return g",
     "g = h = aux\n    h = g = 1\n    return g + h",
     "g = aux\n    h = g\n    h = x\n    return h",
     "with open(x) as g:\n        h = aux\n    h = 1\n    return h",
     "g = aux\n    with open(x) as g:\n        return g.read()"],
)  # fmt: skip
def test_a_helper_that_is_only_mentioned_is_not(body):
    assert use(f"def f(x):\n    {body}\n").called == ()


@pytest.mark.parametrize(
    "body",
    [
        "t = 0\n    t += aux(x)\n    return x",
        "t = 0\n    t = t + aux(x)\n    return x",
        "unused, y = aux(x), x + 1\n    return y",
        "[unused, *y] = [aux(x), x, 1]\n    return y",
        "y, *unused = x, 1, aux(x)\n    return y",
        "a = aux(x)\n    b = a\n    return x",
        "a = b = 0\n    a += aux(x)\n    b += a\n    return x",
        "g = aux\n    g(x)\n    return x",
        "str(aux(x))\n    return x",
        "list(map(aux, x))\n    return x",
        "y = len(aux(x)) + 1\n    return x",
        "y = ' '.join(aux(x))\n    return x",
        "y = aux(x)\n    del y\n    return x",
        "def g():\n        y = aux(x)\n        return 1\n    y = 2\n    return g() + y",
    ],
)
def test_results_that_nothing_reads(body):
    found = use(f"def f(x):\n    {body}\n")
    assert (found.called, found.ignored) == (("aux",), ("aux",))


@pytest.mark.parametrize(
    "body",
    [
        "t = 0\n    t += aux(x)\n    return t",
        "y, z = aux(x), x\n    return y + z",
        "a = aux(x)\n    b = a\n    return b",
        "a, b = b, a = aux(x), 1\n    return a",
        "out = []\n    out.append(aux(x))\n    return out",
        "_ = print(aux(x))\n    return x",
        "_ = [out.append(aux(y)) for y in x]\n    return x",
        "def g(y):\n        return y\n    z = g(aux(x))\n    return x",
        "t = 0\n    for y in x:\n        t += aux(y)\n    return t",
    ],
)
def test_results_that_are_read(body):
    assert use(f"def f(x):\n    {body}\n").ignored == ()


def test_a_support_function_binds_for_the_module():
    text = "def f(x):\n    g()\n    return aux(x)\ndef g():\n    global aux\n    aux = abs\n"
    functions = extract(text).by_name()
    assert main_use(functions["f"], ["aux"], [functions["g"]]).called == ()
    assert main_use(functions["f"], ["aux"]).called == ("aux",)
