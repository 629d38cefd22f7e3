"""``module:NAME`` in a configuration → what it names, and whose errors the user has to fix."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comlrl.config.plugins.modules import Source, check_name, import_beside, is_beside, on_path
from comlrl.errors import UserError, near

FROM_PYTHON = "from Python"  # in a configuration: the value of a key that was passed as an object
FORM = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")


class TargetError(UserError):
    """The user's own code failed in the middle of a run; the message says which and where."""

    exit_code = 1


@dataclass(frozen=True)
class Target:
    """The object that a ``module:NAME`` refers to, and the files that define it."""

    key: str  # e.g. "reward.target"
    value: str
    obj: Any
    sources: tuple[Source, ...]  # the files that define it

    def __str__(self) -> str:
        return f"{self.key}: '{self.value}'"

    @contextlib.contextmanager
    def calling(self, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Convert exceptions of the user's code, except ``passing``, to a TargetError that names
        the place in their code."""
        try:
            yield
        except passing:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                raise
            raise TargetError(f"{self} raised {described(error, self.sources)}") from error


_passed: ContextVar[Mapping[str, Target]] = ContextVar("passed", default={})  # noqa: B039


@contextlib.contextmanager
def passing(targets: Iterable[Target]) -> Iterator[None]:
    """Make keys with the value ``from Python`` refer to these objects within the context."""
    token = _passed.set({target.key: target for target in targets})
    try:
        yield
    finally:
        _passed.reset(token)


def passed(key: str) -> Target:
    """Return the object passed from Python for a key. Raises UserError if there is none."""
    if key not in _passed.get():
        raise UserError(
            f"{key}: '{FROM_PYTHON}', and nothing was passed for it; continue and evaluate this "
            "run from Python (comlrl.train, comlrl.evaluate), or name a module or file here"
        )
    return _passed.get()[key]


def load(key: str, value: str, folder: Path) -> Target:
    """Import the object that ``module:NAME`` refers to, from beside the YAML file in ``folder`` or
    from the Python path; for ``from Python``, return the passed object.

    Raises UserError, naming ``key`` and ``value``, if that fails.
    """
    if value == FROM_PYTHON:
        return passed(key)
    setting = f"{key}: {value!r}"
    form = FORM.fullmatch(value)
    if form is None:
        raise UserError(f"{setting} is not of the form module:NAME, e.g. my_work:Mine")
    name, attribute = form.groups()
    folder = folder.resolve()
    module, sources = _imported(setting, name, folder)
    if not hasattr(module, attribute):
        names = [n for n in vars(module) if not n.startswith("_")]
        hint = near(attribute, names, "there are {}")
        raise UserError(f"{setting}: `{name}` has no `{attribute}`; {hint}")
    return Target(key, value, getattr(module, attribute), sources)


def _imported(setting: str, name: str, folder: Path) -> tuple[Any, tuple[Source, ...]]:
    importlib.invalidate_caches()
    try:
        if is_beside(name, folder):
            check_name(name, folder)
            return import_beside(name, folder)
        module = importlib.import_module(name)
        return module, on_path(module)
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            beside = [file.stem for file in folder.glob("*.py")]
            hint = near(name, beside, "there are {} beside it")
            raise UserError(
                f"{setting}: there is no module `{name}` beside the YAML file, in {folder}, or on "
                f"the Python path; {hint}"
            ) from error
        raise UserError(f"{setting}: importing it raised {described(error, folder)}") from error


def check_class(target: Target, protocol: type, methods: Iterable[str]) -> None:
    """Check the methods of a class. Raises UserError like ``check_methods``, or if ``target`` is
    not a class."""
    if not isinstance(target.obj, type):
        raise UserError(f"{target} is not a class; name a class")
    check_methods(target, protocol, methods)


def check_methods(
    target: Target, protocol: type, methods: Iterable[str], *, inherited: bool = False
) -> None:
    """Raise UserError if ``target.obj``, a class or an object, lacks a method, or has one whose
    arguments differ from those in ``protocol``.

    A method inherited from ``protocol`` itself, where it is only a stub, counts as lacking. With
    ``inherited``, no method has to exist.
    """
    is_class = isinstance(target.obj, type)
    places = [
        *([] if is_class else [target.obj]),
        *inspect.getmro(target.obj if is_class else type(target.obj)),
    ]
    for name in methods:
        form = list(inspect.signature(getattr(protocol, name)).parameters)[1:]
        shown = f"{name}({', '.join(form)})"
        place = next((p for p in places if name in getattr(p, "__dict__", {})), protocol)
        method = getattr(place if is_class else target.obj, name, None)
        if place is protocol:
            if inherited:
                continue
            raise UserError(f"{target} has no method `{shown}`; add it")
        if not callable(method):
            raise UserError(f"{target}: its `{name}` is {method!r}; write a method `{shown}`")
        unbound = is_class and inspect.isfunction(vars(place)[name])
        try:
            inspect.signature(method).bind(*form, *["self"] * unbound)
        except TypeError as error:
            raise UserError(f"{target}: its `{name}` is not called as {shown}: {error}") from error
        except ValueError:  # built-ins may have no signature
            continue


def described(error: BaseException, where: Path | Iterable[Source]) -> str:
    """Return an error's type, message and place, on one line.

    The place is the innermost one in the user's own files (``where``: these, or their folder), or
    else of the whole traceback.
    """
    kind = type(error).__name__
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{kind}: {error.msg} ({error.filename}:{error.lineno})"
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:  # the user's ``__str__`` may raise
        text = ""
    frames = traceback.extract_tb(error.__traceback__)
    user_files = None if isinstance(where, Path) else {str(source.file) for source in where}

    def is_users(file: str) -> bool:
        if user_files is None:
            return Path(file).is_relative_to(str(where))
        return file in user_files

    last = frames[-1] if frames else None
    frame = next((f for f in reversed(frames) if is_users(f.filename)), last)
    return f"{kind}{': ' if text else ''}{text}" + (
        f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
    )
