"""The table, from many measurements."""

import dataclasses
import statistics

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Row:
    """What is compared: a kind of request on a contestant, and on which store."""

    contestant: str
    kind: str
    store: str
    gate: bool

    @classmethod
    def of(cls, contestant, kind):
        stores = contestant.gate and kind.name != "pass-through"
        return cls(contestant.name, kind.name, contestant.store.name if stores else "", contestant.gate)

    def title(self):
        if not self.gate:
            return self.contestant
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

    def against(self, connections, rounds, contestant):
        """The median over the rounds of the rate divided by that of nginx or HAProxy in the same round."""
        for row, others in self.rows(connections).items():
            if row.contestant == contestant and not row.gate:
                return statistics.median(result.rate / others[at].rate for at, result in rounds.items() if at in others)
        return None

    def markdown(self):
        lines = [self.setting(), ""]
        for connections in self.options.connections:
            lines += [f"{connections} connection{'s' if connections > 1 else ''}:", "", *self.table(connections), ""]
        return "\n".join(lines)

    def setting(self):
        about = "; ".join(f"{name} {value}" for name, value in self.about.items())
        options = self.options
        return (
            f"{about}; fdatasync of 4 KiB: {spread(self.syncs)} a second. Median of {options.rounds} rounds of "
            f"{options.seconds} s."
        )

    def table(self, connections):
        header = ["", "requests/s", "min to max", "x nginx", "x HAProxy", "p50 ms", "p99 ms", "p99.9 ms", "CPU us",
                  "idle MiB", "peak MiB"]
        rows = [header]
        for row, rounds in self.rows(connections).items():
            results = list(rounds.values())

            def middle(name, digits, unit=1):
                return f"{statistics.median(getattr(result, name) for result in results) / unit:,.{digits}f}"

            rates = [result.rate for result in results]
            wrong = any(result.problems for result in results)
            rows.append([
                row.title(),
                "wrong" if wrong else f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} to {max(rates):,.0f}",
                *(ratio(self.against(connections, rounds, other)) for other in ("nginx", "HAProxy")),
                middle("p50", 2), middle("p99", 2), middle("p999", 2), middle("cpu", 1),
                middle("idle", 1, MIB), middle("peak", 1, MIB),
            ])
        return aligned(rows)

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


def spread(values):
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def aligned(rows):
    """A Markdown table that is a table to the eye too."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]

    def line(row):
        cells = [cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * width if at == 0 else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]
