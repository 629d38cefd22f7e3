"""``python -m loggers.report RUN [RUN …]``."""

from __future__ import annotations

import sys

from loggers.report.write import main

sys.exit(main())
