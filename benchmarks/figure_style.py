"""What the pages' figures share: SVG that reads on light and dark pages, at the width of a screen and of a telephone.

A page shows an SVG as an image: it gets no style, no font and no script from the page. So each file brings its own
colours for both schemes, paints its own background, and holds two layouts of one shape, of which the width decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from string import Template

WIDTH, NARROW = 800, 420  # of the two layouts; the second is drawn larger
LETTER = 0.56  # mean width of a letter, of the font's size
# name: on a light page, on a dark one
COLOURS = {
    "ink": ("#1b1f24", "#e6e9ed"), "soft": ("#57606a", "#9aa5b1"), "paper": ("#ffffff", "#14181d"),
    "rule": ("#d8dde3", "#323a44"), "tile": ("#f4f6f8", "#1d232a"), "plain": ("#7b848e", "#8a95a1"),
    "ours": ("#0b7285", "#3bb6cc"), "wash": ("#e3f1f4", "#12323a"), "other": ("#b45309", "#ffa94d"),
    "budget": ("#c92a2a", "#ff6b6b"), "again": ("#6741d9", "#a98bff"),
    "weights": ("#4c6ef5", "#748ffc"), "gradients": ("#e8890c", "#ffc078"), "optimizer": ("#7048e8", "#9775fa"),
    "activations": ("#0ca678", "#38d9a9"),
}  # fmt: skip
_RULES = Template("""\
.card { fill: $paper; stroke: $rule } text { fill: $soft } .ink { fill: $ink } .strong { font-weight: 600 }
.halo { paint-order: stroke; stroke: $paper; stroke-width: 4px; stroke-linejoin: round }
text.ours { fill: $ours } text.other { fill: $other } text.budget { fill: $budget } text.again { fill: $again }
.grid { stroke: $rule } .divide { stroke: $soft; stroke-dasharray: 2 4 }
.line, .arrow { fill: none; stroke-width: 2; stroke-linejoin: round } .line.thin { stroke-width: 1.5 }
.plain { stroke: $plain } .line.ours, .arrow { stroke: $ours } .line.other { stroke: $other }
.line.budget { stroke: $budget; stroke-dasharray: 7 4 } .line.bound { stroke: $soft; stroke-dasharray: 3 3 }
.area { stroke: none; opacity: .22 } .area.plain { fill: $plain } .area.ours { fill: $ours; opacity: .2 }
.area.never { fill: $plain; opacity: .16 } .held { fill: $tile }
.kind { stroke: none } .weights { fill: $weights } .gradients { fill: $gradients } .optimizer { fill: $optimizer }
.activations { fill: $activations } .kind.other { fill: $plain }
.dot { fill: $ours } .method { fill: $other }
.head { fill: $ours } .head.again { fill: $again } .head.budget { fill: $budget }
.box { fill: $wash; stroke: $ours; stroke-width: 1.5 } .box.quiet { fill: $tile; stroke: $plain }
.box.again { fill: $paper; stroke: $again; stroke-width: 2 } .box.budget { fill: $paper; stroke: $budget }
.arrow.again { stroke: $again } .arrow.budget { stroke: $budget }
.gone { fill: none; stroke: $plain; stroke-dasharray: 4 4 } .alive { fill: $ours } .alive.again { fill: $again }
""")
_LIGHT, _DARK = ({name: pair[scheme] for name, pair in COLOURS.items()} for scheme in (0, 1))
_STYLE = (
    f"{_RULES.substitute(_LIGHT)}@media (prefers-color-scheme: dark) {{\n{_RULES.substitute(_DARK)}}}\n"
    ".narrow { display: none } @media (max-width: 560px) { .wide { display: none } .narrow { display: inline } }"
)


class Layout:
    """One of a figure's layouts: ``width`` x ``height`` units, text of ``size``.

    Attributes:
        parts: SVG elements so far.
    """

    def __init__(self, width: int, height: float, size: float) -> None:
        self.width, self.height, self.size = width, height, size
        self.narrow = width == NARROW
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start", size: float = 0) -> None:
        """``anchor``: start, middle or end."""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        scale = f' font-size="{size:g}"' if size else ""
        self.parts.append(f'<text{_css(css)} x="{x:.1f}" y="{y:.1f}"{where}{scale}>{escape(text)}</text>')

    def line(self, css: str, x1: float, y1: float, x2: float, y2: float) -> None:
        self.path(css, f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}")

    def path(self, css: str, d: str) -> None:
        self.parts.append(f'<path class="{css}" d="{d}"/>')

    def rect(self, css: str, x: float, y: float, width: float, height: float, radius: float = 0) -> None:
        rounded = f' rx="{radius:g}"' if radius else ""
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{rounded}'
        self.parts.append(f'<rect class="{css}" {shape}/>')

    def dot(self, css: str, x: float, y: float, radius: float) -> None:
        self.parts.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>')

    def arrow(self, points: Sequence[tuple[float, float]], css: str = "") -> None:
        """A line through ``points`` with a head at the last; the last piece is horizontal or vertical."""
        (x0, y0), (x1, y1) = points[-2:]
        along, up = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        long, wide = 8, 4
        back = x1 - along * long, y1 - up * long
        self.path(f"arrow {css}".strip(), "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in [*points[:-1], back]))
        sides = [(back[0] + side * up * wide, back[1] + side * along * wide) for side in (1, -1)]
        head = "L".join(f"{x:.1f} {y:.1f}" for x, y in [(x1, y1), *sides])
        self.path(f"head {css}".strip(), f"M{head}Z")


def figure(title: str, describes: str, height: int, draw: Callable[[Layout], None], size: float = 14) -> str:
    """An SVG file that ``draw`` fills, once for each layout.

    Args:
        title, describes: For those who do not see it: what it is, and what it shows.
        height: Of the wide layout; the narrow one has the same shape.
        size: Of the wide layout's text.
    """
    wide = Layout(WIDTH, height, size)
    narrow = Layout(NARROW, height * NARROW / WIDTH, 12.5)
    for layout in (wide, narrow):
        draw(layout)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="t d" \
font-family="system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif">
<title id="t">{escape(title)}</title>
<desc id="d">{escape(describes)}</desc>
<style>
{_STYLE}
</style>
<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>
<g class="wide" font-size="{size:g}">
{_joined(wide)}
</g>
<g class="narrow" font-size="{narrow.size:g}" transform="scale({WIDTH / NARROW:.4f})">
{_joined(narrow)}
</g>
</svg>
"""


def _joined(layout: Layout) -> str:
    return "\n".join(layout.parts)


def _css(names: str) -> str:
    return f' class="{names}"' if names else ""
