"""Peak memory of a training step, LoRA agents on one base against the peer's full models.

    python benchmarks/bench_memory.py [--device cpu] [--hidden 768] [--layers 12] [--tasks 6]

A model of the given shape with random weights (Qwen2 architecture, the embedded tokenizer), two
agents, G = 4, the same tasks; frozen weights and the peer's in bfloat16. On a CPU the memory is the
process's peak above that of importing the packages; on a GPU it is the allocator's peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_train_step import MODEL, PEER, ROOT, hide_gpus, make_peer, peer_job, runner

IMPORTS = "import torch, transformers, peft, datasets, resource as r; " + (
    "from transformers import AutoModelForCausalLM; from peft import get_peft_model; "
    "print(r.getrusage(r.RUSAGE_SELF).ru_maxrss / 2**10)"
)


def make_model(folder: Path, width: int, layers: int) -> int:
    """Save a random model; returns its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.update(
        {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "num_attention_heads": max(1, width // 64),
            "num_key_value_heads": max(1, width // 256),
        }
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    for file in MODEL.glob("token*"):
        shutil.copy(file, folder)
    return sum(p.numel() for p in model.parameters())


def ours(model: Path, tasks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "train_magrpo.py", "--config", "configs/magrpo_quickstart.yaml",
            "--override", f"output.dir={run}", f"agent_model.name={model}",
            "agent_model.torch_dtype=bfloat16",
            "magrpo.num_generations=4", f"magrpo.batch_size={tasks}", "magrpo.max_steps=1",
            "magrpo.max_new_tokens=32", "magrpo.eval_interval=0", "output.save_final_model=false",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return json.loads((run / "summary.json").read_text())["train"]["peak_memory_mb"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tasks", type=int, default=6)
    arguments = parser.parse_args()
    hide_gpus(arguments.device)
    make_peer()
    base = 0.0
    if arguments.device == "cpu":
        process = subprocess.run(
            [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
        )
        base = float(process.stdout)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), arguments.hidden, arguments.layers)
        job = peer_job(arguments, arguments.tasks)
        job |= {"model": folder, "max_new_tokens": 32, "batch_size": arguments.tasks}
        job["dtype"] = "bfloat16"
        theirs = runner(PEER / "bin" / "python", "peer_runner.py", job)["peak_memory_mb"] - base
        mine = ours(Path(folder), arguments.tasks) - base
    work = f"2 agents, {arguments.tasks} tasks × G = 4, one update"
    print(f"model of {parameters / 1e6:.0f}M parameters, {work}")
    print("| | peak memory above imports, MB | ratio |\n|---|---|---|")
    print(f"| peer | {theirs:.0f} | 1 |\n| ours, LoRA | {mine:.0f} | {mine / theirs:.2f} |")
    if base:
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
        print(f"\nimports alone: {base:.0f} MB; largest process: {children:.0f} MB")


if __name__ == "__main__":
    main()
