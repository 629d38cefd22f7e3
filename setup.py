"""The wheel: the packages beside ``comlrl`` are installed below it; the rest is in pyproject.toml.

``rewards``, ``loggers`` and the like are names that other projects use too, so a wheel must not
put them at the top level. The imports in its copies are rewritten to match. An editable
installation is the checkout as it is.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BELOW = ("rewards", "external", "loggers", "trainers")
FROM = re.compile(rf"^(\s*)from ({'|'.join(BELOW)})(?=[. ])", re.MULTILINE)
IMPORT = re.compile(rf"^(\s*)import ({'|'.join(BELOW)})$", re.MULTILINE)


class BuildBelow(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        for path in [*(built / name for name in BELOW), *built.glob("train_*.py")]:
            target = built / "comlrl" / path.name
            if target.is_dir():  # of an earlier build
                shutil.rmtree(target)
            path.rename(target)
        for file in [*(built / "comlrl").rglob("*.py"), built / "comlrl/__init__.pyi"]:
            text = FROM.sub(r"\1from comlrl.\2", file.read_text(encoding="utf-8"))
            file.write_text(IMPORT.sub(r"\1from comlrl import \2", text), encoding="utf-8")


class OneName(bdist_wheel):
    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        Path(distinfo_path, "top_level.txt").write_text("comlrl\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildBelow, "bdist_wheel": OneName})
