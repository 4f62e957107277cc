"""Loads the stand-in when PyTorch is imported: CUDA's libraries before it, the value layer after it.

``python -m cuda_standin enable`` writes ``import cuda_standin.autoload`` into a ``.pth`` file of the environment, so
that every process of it has this hook. It costs nothing until ``torch`` is imported.
"""

import sys


class _BeforeTorch:
    """A finder that stands first: it loads the libraries, lets PyTorch be imported, then installs the values."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        from cuda_standin import loading, settings

        spec = PathFinder.find_spec(name, path)
        if spec is None or settings.is_off():
            return spec
        loading.load_libraries(spec)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            loading.load_values(module)

        spec.loader.exec_module = exec_module
        return spec


if "torch" not in sys.modules and not any(isinstance(finder, _BeforeTorch) for finder in sys.meta_path):
    sys.meta_path.insert(0, _BeforeTorch())
