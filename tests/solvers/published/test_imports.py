"""Published methods stand on plain data alone: on no lower bound, and on nothing that builds plans."""

import ast
from functools import cache
from pathlib import Path

import lowtide

SOURCE = Path(lowtide.__file__).parent
MODULES = {
    "lowtide." + path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", "."): path
    for path in (SOURCE / "solvers").rglob("*.py")
    if path.name != "__init__.py"
}


@cache
def imports_of(module):
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return sorted(found & MODULES.keys())


def test_published_methods_need_neither_the_lower_bound_nor_plans():
    published = [module for module in MODULES if ".published." in module]
    reached, left = set(), list(published)
    while left:
        for name in set(imports_of(left.pop())) - reached:
            reached.add(name)
            left.append(name)

    assert published and "lowtide.solvers.candidate" in reached
    assert not {name for name in reached if ".lower_bound." in name or name.endswith((".build_plan", ".infeasible"))}
