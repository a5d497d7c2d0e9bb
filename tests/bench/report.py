"""The table, from many measurements."""

import dataclasses
import statistics
import textwrap

import chart
import statements
from contestants import NO_PROXY
from load import NEW
from processes import Failed
from stores import STORES

MIB = 1 << 20

# More cores than this used by others, and the figures get a warning.
BUSY = 0.2


@dataclasses.dataclass(frozen=True)
class Row:
    """What is compared: a kind of request on a contestant, and on which store."""

    contestant: str
    kind: str
    store: str
    gate: bool

    @classmethod
    def of(cls, contestant, kind):
        stores = contestant.store and not kind.name.startswith("pass-through")
        return cls(contestant.name, kind.name, contestant.store.name if stores else "", contestant.gate)

    def title(self):
        if self.kind == statements.KIND:
            return f"{self.contestant}, {self.kind}"
        if not self.store and not self.gate:
            return self.contestant + self.kind.removeprefix("pass-through")
        return f"{self.contestant}, {self.kind}" + (f", {self.store}" if self.store else "")


class Report:
    """All measurements of one run."""

    def __init__(self, about, labels, options):
        self.about, self.labels, self.options = about, labels, options
        self.syncs = []
        self.results = {}  # (connections, row) -> {round: Result}

    def add(self, round_, connections, row, result):
        self.results.setdefault((connections, row), {})[round_] = result

    def problems(self):
        """What is not what it claims to be."""
        return [
            f"{row.title()} at {connections} connections, round {round_ + 1}: {problem}"
            for (connections, row), rounds in self.results.items()
            for round_, result in rounds.items()
            for problem in result.problems
        ]

    def rows(self, connections):
        return {row: rounds for (at, row), rounds in self.results.items() if at == connections}

    def against(self, connections, of, contestant):
        """The rate of a row divided by that of nginx or HAProxy in the same round: the median over the rounds."""
        passing = of.kind if of.kind.startswith("pass-through") else "pass-through"
        rows = self.rows(connections)
        for row, others in rows.items():
            if row.contestant == contestant and row.kind == passing and not row.gate:
                ratios = [result.rate / others[at].rate for at, result in rows[of].items() if at in others]
                return statistics.median(ratios)
        return None

    def beside_statements(self):
        """New keys beside the statements alone that pgbench sends: a line for each number of connections and store."""
        table = [["", "new keys/s", "pgbench pairs/s", "× pgbench", "mean ms", "pgbench mean ms", "more ms"]]
        for connections in self.options.connections:
            rows = self.rows(connections)
            pairs = next((rounds for row, rounds in rows.items() if row.kind == statements.KIND), None)
            for row, rounds in rows.items():
                both = [(rounds[at], pairs[at]) for at in rounds if at in pairs] if pairs else []
                if row.kind != NEW.name or not row.gate or not row.store.startswith("postgres") or not both:
                    continue
                wrong = any(result.problems for result in (*rounds.values(), *pairs.values()))
                title = f"{connections} connection{'s' if connections > 1 else ''}, {row.contestant}, {row.store}"
                table.append([title, *(["wrong"] * 6 if wrong else [
                    spread([gate.rate for gate, _ in both]), spread([pair.rate for _, pair in both]),
                    spread([gate.rate / pair.rate for gate, pair in both], 2),
                    spread([gate.mean for gate, _ in both], 2), spread([pair.mean for _, pair in both], 2),
                    spread([gate.mean - pair.mean for gate, pair in both], 2),
                ])])
        return table if len(table) > 1 else None

    def markdown(self, only=None):
        """Everything, or the table of `only` so many connections, for people and for a Markdown page."""
        parts = [self.setting()]
        for connections in [only] if only else self.options.connections:
            title = f"{connections} connection{'s' if connections > 1 else ''}"
            table = "\n".join(self.table(connections))
            parts.append(f"{title}:\n\n{table}")
        beside = self.beside_statements()
        if beside:
            parts.append("New keys beside the statements alone, each ratio and difference of the same round:\n\n"
                         + "\n".join(aligned(beside)))
        parts += self.notes()
        return "\n\n".join(part if "|" in part else textwrap.fill(part, 120) for part in parts) + "\n"

    def charted(self):
        """The number of connections that the chart shows: the one nearest to 64."""
        return min(self.options.connections, key=lambda number: abs(number - 64))

    def setting(self):
        """What the figures depend on."""
        about = "; ".join(f"{name} {value}" for name, value in self.about.items())
        others = self.others()
        return (
            f"{about}; fdatasync of 4 KiB {spread(self.syncs)} a second. Cores used by anything else meanwhile "
            f"{statistics.median(others):.2f} (at most {max(others):.2f}). {self.median_of()}, in brackets the "
            "least and the most."
        )

    def median_of(self):
        rounds = self.options.rounds
        return f"Median of {rounds} round{'s' if rounds > 1 else ''} of {self.options.seconds} s"

    def others(self):
        results = [result for rounds in self.results.values() for result in rounds.values()]
        return [result.others for result in results if result.others is not None] or [0]

    def notes(self):
        """How to read the table."""
        lines = [
            "A ratio is the median of those within each round. The load is a closed loop: a connection of wrk sends its next "
            "request when it has its answer. So the latencies are those of a proxy under as much load as it takes. "
            "CPU is what the proxy's processes use for a request, user and system, beside wrk's. Memory is resident: "
            "idle after the start, at its peak in this measurement, and at its end.",
        ]
        if any(row.store.startswith("postgres") for _, row in self.results):
            lines.append(
                "Where a store has processes of its own, theirs stands behind the +. The program pgbench sends the "
                "statements that claim and settle, one at a time from as many clients, each with its commit: a pair is one request."
            )
        if statistics.median(self.others()) > BUSY:
            lines.append(
                f"The machine was busy with other things, by {statistics.median(self.others()):.1f} cores, so these "
                "figures are too low, and their ratios are rough."
            )
        limited = [
            f"{row.title()} at {connections}"
            for (connections, row), rounds in self.results.items()
            if statistics.median(result.load_share or 0 for result in rounds.values()) > 0.95
        ]
        if limited:
            lines.append(f"wrk used its core to the full, so these could be faster: {'; '.join(limited)}.")
        return lines

    def table(self, connections):
        """One line for each row, as Markdown."""
        table = [["", "requests/s", "× nginx", "× HAProxy", "p50 ms", "p99 ms", "p99.9 ms", "CPU µs",
                  "wrk µs", "memory MiB"]]
        for row, rounds in self.rows(connections).items():
            results = list(rounds.values())

            def middle(name, digits, unit=1):
                found = [getattr(result, name) for result in results]
                return "-" if None in found else f"{statistics.median(found) / unit:,.{digits}f}"

            def used():
                store = middle("store_cpu", 1)
                return middle("cpu", 1) + ("" if store == "-" else f" + {store}")

            def memory():
                found = [middle(name, 0, MIB) for name in ("idle", "peak", "end")]
                return "-" if "-" in found else ", ".join(found)

            wrong = any(result.problems for result in results)
            table.append([
                row.title(),
                "wrong" if wrong else spread([result.rate for result in results]),
                *("-" if wrong or row.kind == statements.KIND else ratio(self.against(connections, row, other))
                  for other in ("nginx", "HAProxy")),
                middle("p50", 2), middle("p99", 2), middle("p999", 2), used(), middle("load_cpu", 1), memory(),
            ])
        return aligned(table)

    def chart(self):
        """An SVG of the rates, on durable stores."""
        connections = self.charted()
        bars = []
        for row, rounds in self.rows(connections).items():
            if row.kind not in ("pass-through", "replays", "new keys") or row.contestant == NO_PROXY:
                continue
            if row.store and not STORES[row.store].durable:
                continue
            rates = [result.rate for result in rounds.values()]
            against = self.against(connections, row, "nginx")
            behind = f"{against:.2f} × nginx" if against and row.contestant != "nginx" else ""
            name = row.title() if row.gate or row.store else f"{row.title()}, pass-through"
            bars.append((name, row.gate, statistics.median(rates), min(rates), max(rates), behind))
        if not bars:
            raise Failed("nothing was measured that the chart shows: it needs pass-through, replays or new keys")
        notes = [
            f"Cores: {self.about['cores']}, shared by the proxy, its upstream and wrk. nginx "
            f"{self.about['nginx']} and HAProxy {self.about['HAProxy'].partition('-')[0]} run one worker each.",
            f"One by one, this disk makes {statistics.median(self.syncs):,.0f} syncs a second; sqlite answers when its "
            f"are done. {self.median_of()}.",
        ]
        has_middleware = any(row.store and not row.gate for row in self.rows(connections))
        if has_middleware:
            notes.append("The Express application answers itself, by one process and without a proxy: see tests/bench/middleware.")
        others = "nginx, HAProxy and a middleware" if has_middleware else "nginx and HAProxy"
        return chart.draw(f"oncegate beside {others}, {connections} connections", bars, notes)

    def as_json(self):
        return {
            "about": self.about,
            "syncs_per_second": self.syncs,
            "measurements": [
                {"connections": connections, "round": round_, **dataclasses.asdict(row), **dataclasses.asdict(result)}
                for (connections, row), rounds in self.results.items()
                for round_, result in rounds.items()
            ],
        }


def ratio(value):
    return "-" if value is None else f"{value:.2f}"


def spread(values, digits=0):
    """The median, and where there are several values, the least and the most."""
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f}..{max(values):,.{digits}f})"


def write_between(path, begin, end, text):
    """Puts a text between two marks of a file."""
    before, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise Failed(f"{path} lacks the marks `{begin}` and `{end}`")
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


def aligned(rows):
    """A Markdown table that is a table to the eye too."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def line(row):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * width if at == 0 else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]
