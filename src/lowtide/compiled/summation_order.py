"""In which orders the kernels of generated code add up.

A sum in another order has other last digits in single precision. Where it is rounded to bfloat16 next, these show in
one of some ten thousand values, which the samples of a small layer may miss. The code shows the order always; of
Triton's kernels the block sizes do, which PyTorch chooses when it compiles one, or times them when it first runs.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping

_KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\(.*?'''(.*?)'''", re.DOTALL | re.MULTILINE)
# Inductor's C++. The greatest, the least, truth and integers come out the same in any order.
_SUM = re.compile(r"^( *)(?:float|double|Welford<\w+>) (tmp_acc\d+) = (?!.*infinity)")
_NUMBER = r"(?:static_cast<\w+>\()?([^;]+?)\)?"
_LOOP = re.compile(rf"^( *)for *\(\w+ \w+ *= *{_NUMBER}; *\w+ *< *{_NUMBER}; *\w+ *(?:\+= *{_NUMBER}|\+\+)\)$")
_TRITON = re.compile(r"@triton_heuristics\.(\w*reduction)\(\s*size_hints=({.*?}),")
_ADDS = re.compile(r"\btl\.sum\(|welford\w*\(|online_softmax\w*\(")


def summation_orders(source: str, blocks: Mapping[str, str] | None = None) -> Counter[str]:
    """How often Inductor's code adds up in each way: in C++ along which loops, and how the lanes are added in the end;
    in Triton in kernels of which sizes. Empty where no kernel adds up.

    Args:
        blocks: Block sizes of Triton's kernels, by their text; None: as long as nobody knows them.
    """
    found = Counter[str]()
    for code, calls, in_cpp, in_triton in _sums_of(source):
        chosen = "" if blocks is None else " " + blocks.get(code, f"unknown blocks of {code}")
        orders = [*in_cpp, *(order + chosen for order in in_triton)]
        found += Counter({order: calls * num for order, num in Counter(orders).items()})
    return found


@functools.lru_cache(maxsize=16)  # that of the plain code is asked for with each variant
def _sums_of(source: str) -> list[tuple[str, int, list[str], list[str]]]:
    """Of each kernel: its text, how often it is called, and how it adds up."""
    kernels = _KERNEL.findall(source)
    called = {name: len(re.findall(rf"(?<!def )\b{name}(?:\.run)?\(", source)) for name, _ in kernels}
    return [(code, called[name], [*_in_cpp(code)], sums_in_triton(code)) for name, code in kernels]


def add_up_alike(
    plain: tuple[str, str],
    other: tuple[str, str],
    plain_blocks: Mapping[str, str] | None = None,
    blocks: Mapping[str, str] | None = None,
) -> bool:
    """Whether ``other`` adds up as ``plain`` does, both code of a forward and of a backward: in the same orders, and
    besides in those of the forward, whose sums a backward may make again."""
    first, expected, found = summation_orders(plain[0], plain_blocks), Counter[str](), Counter[str]()
    for one, of, its in ((plain, plain_blocks, expected), (other, blocks, found)):
        its.update(summation_orders(one[0], of) + summation_orders(one[1], of))
    return expected <= found and (found - expected).keys() <= first.keys()


def _in_cpp(code: str) -> Iterator[str]:
    lines = code.splitlines()
    for at, line in enumerate(lines):
        if declared := _SUM.match(line):
            indent, name = declared[1], declared[2]
            block = list(_block(lines, at + 1, len(indent)))
            last = [text.strip().replace(name, "sum") for text in block if text.startswith(f"{indent}{name} = ")]
            loops = [loop for loop in map(_LOOP.match, _first_loop(block, len(indent))) if loop]
            yield f"{[(loop[3], loop[4] if last else '') for loop in loops]} {last or 'one by one'}"


def _block(lines: list[str], begin: int, indent: int) -> Iterator[str]:
    """The lines up to the end of the scope that is indented so far."""
    for at in range(begin, len(lines)):
        if not lines[at].startswith(" " * indent):
            return
        yield lines[at]


def _first_loop(block: list[str], indent: int) -> Iterator[str]:
    """The lines of the first loop at this depth."""
    within = False
    for line in block:
        within = within or (_LOOP.match(line) is not None and not line.startswith(" " * (indent + 1)))
        if within:
            yield line
            if line == " " * indent + "}":
                return


def sums_in_triton(code: str) -> list[str]:
    """The sizes of a kernel of Triton, once for each sum in it; kernels of the same sizes have block sizes alike."""
    return [order for kind, sizes in _TRITON.findall(code) for order in [f"{kind} {sizes}"] * len(_ADDS.findall(code))]
