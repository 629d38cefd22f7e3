"""How main uses the helpers: calls, values handed on, results that nothing reads, names."""

from __future__ import annotations

import pytest

from comlrl.rewards.code.analysis.extraction import extract
from comlrl.rewards.code.analysis.usage import main_use


def use(source: str, helpers=("aux",)):
    nodes = [part.node for part in extract(source).parts]
    return main_use(nodes, "f", helpers)


def test_calls():
    assert use("def f(x):\n    return [aux(y) for y in x]").called == ("aux",)
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
        "return functools.partial(aux)(x) + 1",
        "y = functools.partial(aux, x)()\n    return y",
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
    made = "g = functools.partial(aux)\ndef f(x):\n    return g(x) + 1"
    assert use(made).wrapper
    assert not use("T = list(map(aux, range(9)))\ndef f(x):\n    return T[x] + 1").wrapper
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
        "for t in [aux(x)]: pass\n    return x",
        "for t in (aux(x), aux(1)): y = x + 1\n    return y",
        "for t in aux(x): pass\n    return x",
        "for t in list(map(aux, x)): pass\n    return x",
        "match aux(x):\n        case t: pass\n    return x",
        "match aux(x):\n        case _: y = x + 1\n    return y",
        "(lambda: aux(x))()\n    return x",
        "(lambda y: aux(y))(x)\n    return x",
        "y = (lambda: aux(x))()\n    return x",
        "def g(): return aux(x)\n    g()\n    return x",
        "def g(): return aux(x)\n    y = g()\n    return x",
        "def g():\n        y = aux(x)\n        return y + 1\n    h = g\n    h()\n    return x",
        "g = lambda: aux(x)\n    g()\n    return x",
        "import functools\n    functools.partial(aux)(x)\n    return x",
        "import functools\n    g = functools.partial(aux, x)\n    g()\n    return x",
        "y = [x + 1 for t in [aux(x)]]\n    return y[0]",
        "y = (aux(x), x + 1)[1]\n    return y",
        "y = [x, aux(x)][0]\n    return y",
        "y = aux(x) if x else aux(1)\n    return x",
        "y = {'k': aux(x)}\n    return x",
        "aux(x) and 1\n    return x",
        "table = [aux]\n    table[0](x)\n    return x",
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
        "y = 0\n    for t in [aux(x)]: y += t\n    return y",
        "y = 0\n    for t in aux(x): y += 1\n    return y",
        "match aux(x):\n        case 3: return 1\n        case t: return t",
        "match aux(x):\n        case [a, b]: return a\n    return x",
        "def g(): return aux(x)\n    y = g()\n    return y",
        "g = lambda: aux(x)\n    return g() + 1",
        "def g(): out.append(aux(x))\n    out = []\n    g()\n    return out",
        "y = [x, aux(x)][1]\n    return y",
        "y = [t for t in [aux(x)]]\n    return y[0]",
        "y = {}\n    y['k'] = aux(x)\n    return y",
        "y, x.z = 1, aux(x)\n    return y",
        "y = sorted(x, key=aux)\n    return y",
        "with open(aux(x)) as y: pass\n    return x",
        "yield aux(x)\n    return x",
        "raise ValueError(aux(x))",
        "class C:\n        def g(s): return aux(x)\n    return C().g() + 1",
        "import functools\n    g = functools.lru_cache(aux)\n    y = g(x)\n    return y + 1",
    ],
)
def test_results_that_are_read(body):
    assert use(f"def f(x):\n    {body}\n").ignored == ()


def test_a_support_function_binds_for_the_module():
    text = "def f(x):\n    g()\n    return aux(x)\n"
    assert use(text + "def g():\n    global aux\n    aux = abs\n").called == ()
    assert use(text + "def h():\n    global aux\n    aux = abs\n").called == ("aux",)
