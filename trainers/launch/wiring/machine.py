"""Checks of a run's devices, and settings of their kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

from comlrl.errors import UserError


def check_devices(devices: Sequence[str], shares_base: bool) -> None:
    """Raise UserError for ``agent_devices`` that this machine or the team cannot use."""
    import torch

    from comlrl.processes import distributed

    devices = list(devices)
    if shares_base:
        raise UserError(
            f"agent_devices: {devices} for agents that share one base; set a model for each with "
            "`agents`, or agent_devices=null"
        )
    if distributed.local_world_size() > 1:
        raise UserError(
            f"agent_devices: {devices} with {distributed.local_world_size()} processes on a "
            "machine, which would all use these; start one process a machine"
        )
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UserError(
                f"agent_devices: '{name}' is not a device; use e.g. cuda:1 or cpu"
            ) from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"agent_devices: '{name}'; this machine has {torch.cuda.device_count()} GPU(s)"
            )


def deterministic() -> None:
    """Use kernels whose sums are bit-equal in every run; an operation without such a kernel raises.

    The sampler turns this off for itself (``comlrl.rollout.generation``).
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # cuDNN attention has a nondeterministic backward pass, and plans anew for each of the many
    # shapes of packed batches. Flash and memory-efficient attention are used instead.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The call is in peft, so users cannot avoid the warning.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
