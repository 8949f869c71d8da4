"""What a prediction costs: `python benchmarks/whatif/run.py [--quick]`.

Whole commands, each in turn with `python -c "import torch"`, which any tool that needs torch pays before it starts:

from      `whatif --from RECORD` of a sweep that is made first
costs     a grid of 100 combinations of a spec with given costs
70B       a grid of 100 combinations of an estimated model of 70 billion parameters

Prints a Markdown table of ratios and of the seconds that the issue names.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reference import circumstances, interval, table

from chunktune.stats import paired_log_ratio

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CHUNKTUNE = [sys.executable, "-m", "chunktune"]
TORCH = [sys.executable, "-c", "import torch"]
SWEPT = """
[model]
family = "sleep"
layers = 2
seconds_per_chunk = 0.004
seconds_per_sample = 0.001
[pipeline]
stages = 2
schedule = "gpipe"
[batch]
mini_batch = 16
"""
GRID = ["--vary", "recompute=none,full", "--vary", "schedule=gpipe,1f1b"]
COSTS = [*GRID, "--vary", "K=2,4,8,16,32", "--vary", "b=2,3,4,6,8"]
LARGE = [*GRID, "--vary", "K=4,8,16,32,64", "--vary", "N=64,128,256,512,1024"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a prediction costs.")
    parser.add_argument("--quick", action="store_true", help="one pair each: to see that it runs")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        record = _swept(Path(folder))
        for name, command, target_s, pairs in (
            ("whatif --from RECORD", ["whatif", "--from", str(record)], 0.7, 15),
            ("grid of 100, costs", ["whatif", str(CONFIGS / "costs.toml"), *COSTS], 10.0, 5),
            ("grid of 100, 70B", ["whatif", str(CONFIGS / "llama_70b.toml"), *LARGE], 10.0, 3),
        ):
            lines.append(_line(name, command, target_s, 1 if arguments.quick else pairs))
    print(table(["command", "pairs", "over import torch", "95 % interval", "median (s)", "target (s)"], lines))
    print(f"\n{circumstances('python benchmarks/whatif/run.py' + ' --quick' * arguments.quick)}")


def _swept(folder: Path) -> Path:
    (folder / "spec.toml").write_text(SWEPT)
    command = [*CHUNKTUNE, "sweep", str(folder / "spec.toml"), "--quick", "-q", "--output-dir", str(folder / "out")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "out" / "record.json"


def _line(name: str, command: list[str], target_s: float, pairs: int) -> list[str]:
    ours, torchs = [], []
    for turn in range(pairs):
        for own in (True, False) if turn % 2 == 0 else (False, True):
            (ours if own else torchs).append(_seconds([*CHUNKTUNE, *command] if own else TORCH))
    found = paired_log_ratio(ours, torchs)
    line = [
        name,
        str(pairs),
        f"{found.ratio:.2f}",
        interval(found.interval),
        f"{statistics.median(ours):.2f}",
        f"{target_s:g}",
    ]
    print("  ".join(line), file=sys.stderr, flush=True)
    return line


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    # A grid in which nothing fits has an answer too.
    if done.returncode not in (0, 3):
        raise RuntimeError(done.stderr)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
