"""A memory benchmark of Liger-Kernel, in a checkout of its repository: ``python liger_script.py CHECKOUT SCRIPT``.

The script is as published. What it measures by time is left out, and what it would write into its table is printed.
"""

import importlib.metadata
import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    checkout, name = sys.argv[1:]
    scripts = Path(checkout) / "benchmark" / "scripts"
    sys.path[:0] = [str(scripts), str(Path(checkout) / "src"), checkout]
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name == "liger-kernel" else version(name)
    import utils

    run = utils.run_benchmarks

    def only_memory(*args: object, **kwargs: object) -> None:
        if kwargs["metric_name"] == "memory":
            run(*args, **kwargs)

    def say(benchmark_data_list: list, **_: object) -> None:
        for data in benchmark_data_list:
            config = json.loads(data.extra_benchmark_config_str or "{}")
            for x, median in zip(data.x_values, data.y_values_50, strict=True):
                key = f"{data.kernel_name} {data.kernel_provider} {data.x_name}={x} T={config.get('T')}"
                print("\nSAID " + json.dumps({key: median * 2**20}))

    utils.run_benchmarks, utils.update_benchmark_data_csv = only_memory, say
    utils.print_benchmark_data = lambda *_: None
    sys.argv = [name]
    runpy.run_path(str(scripts / name), run_name="__main__")


if __name__ == "__main__":
    main()
