"""The chart of the documentation: requests per second as bars, in an SVG of its own making."""

from xml.sax.saxutils import escape

WIDTH, RIGHT, TOP, STEP, BAR = 860, 190, 84, 36, 22
# How wide a letter of a name is at most, on average, in the fonts of STYLE.
LETTER = 8

# The card brings its own background, and so is legible on any page; where the reader's system is dark, it is too.
STYLE = """
text { font-family: -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; font-size: 14px; }
.card { fill: #ffffff; stroke: #d1d9e0; }
.title { font-size: 17px; font-weight: 600; }
.title, .name, .rate { fill: #1f2328; }
.note, .ratio { fill: #59636e; font-size: 12px; }
.other { fill: #9aa4af; }
.gate { fill: #2f6fdb; }
.spread { stroke: #1f2328; stroke-width: 1.5; }
.axis { stroke: #d1d9e0; }
@media (prefers-color-scheme: dark) {
  .card { fill: #151b23; stroke: #3d444d; }
  .title, .name, .rate { fill: #f0f6fc; }
  .note, .ratio { fill: #9198a1; }
  .other { fill: #656c76; }
  .gate { fill: #4f8ef7; }
  .spread { stroke: #f0f6fc; }
  .axis { stroke: #3d444d; }
}
"""


def draw(title, bars, notes):
    """An SVG of bars, each (name, whether it is oncegate, median, least, most, what stands behind the median)."""
    height = TOP + STEP * len(bars) + 18 + 18 * len(notes) + 10
    # The longest name decides where the bars begin: no name is cut off.
    left = 36 + LETTER * max(len(name) for name, *_ in bars)
    scale = (WIDTH - left - RIGHT) / max(most for *_, most, _ in bars)
    bottom = TOP + STEP * len(bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(summary(title, bars), {chr(34): "&quot;"})}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        text("title", 24, 36, title),
        text("note", 24, 58, "requests per second; more is better; the lines show the least and the most"),
        f'<line class="axis" x1="{left}" y1="{TOP - 6}" x2="{left}" y2="{bottom - 6}"/>',
    ]
    for at, (name, gate, median, least, most, behind) in enumerate(bars):
        y = TOP + STEP * at
        middle = y + BAR / 2
        kind = "gate" if gate else "other"
        lines += [
            text("name", left - 12, middle + 5, name, "end"),
            f'<rect class="{kind}" x="{left}" y="{y}" width="{median * scale:.1f}" height="{BAR}" rx="3"/>',
            f'<line class="spread" x1="{left + least * scale:.1f}" y1="{middle}" x2="{left + most * scale:.1f}" '
            f'y2="{middle}"/>',
            f'<text x="{left + max(median, most) * scale + 10:.1f}" y="{middle + 5}"><tspan class="rate">{median:,.0f}'
            f'</tspan><tspan class="ratio" dx="8">{escape(behind)}</tspan></text>',
        ]
    lines += [text("note", 24, bottom + 20 + 18 * at, note) for at, note in enumerate(notes)]
    return "\n".join(lines) + "\n</svg>\n"


def text(kind, x, y, content, anchor="start"):
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'


def summary(title, bars):
    """The chart for those who cannot see it."""
    return f"{title}: " + ", ".join(f"{name} {median:,.0f}" for name, _, median, *_ in bars)
