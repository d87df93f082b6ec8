"""Draws pictures from the raw records of perf/record; see perf/plot."""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Fixed ids and no date, so that the same records give the same file.
plt.rcParams["svg.hashsalt"] = "records"
plt.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})

COLORS = {"ours": "#0b6e4f", "base": "#b3552f", "memcmp": "#777777"}
NAMES = {"ours": "this index", "base": "hash map per block", "memcmp": "memcmp of the same bytes"}


def lines(record):
    """Lines of a record without its head."""
    return [line for line in record.read_text().splitlines() if line and not line.startswith("#")]


def head(record):
    """Commit, processor and day of a record, for the foot of a picture."""
    facts = dict(re.findall(r"^# (\w+): (.*)$", record.read_text(), re.M))
    processor = re.sub(r"^\d+ ", "", facts["processor"])
    return f"{facts['date'][:10]}, {processor}, commit {facts['commit']}"


def save(figure, record, path):
    figure.text(0.01, 0.01, head(record), fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path)


def prompt_length(record, path):
    """Time of a scan against the blocks of its prompt."""
    pattern = re.compile(r"^test scan/length, 8 holders/(\w+)/(\d+) .*bench:\s+([\d,.]+) ns/iter")
    points = {}
    for found in filter(None, map(pattern.match, lines(record))):
        name, blocks, time = found.groups()
        points.setdefault(name, []).append((int(blocks), float(time.replace(",", "")) / 1e3))
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name in ("base", "ours", "memcmp"):
        axes.plot(*zip(*sorted(points[name])), marker="o", color=COLORS[name], label=NAMES[name])
    axes.set(xscale="log", yscale="log", xlabel="blocks of the prompt", ylabel="microseconds")
    axes.set_title("Scan of a prompt that 8 workers hold")
    axes.legend(loc="upper left")
    save(figure, record, path)


def placements(record, path):
    """Bytes against placements: 100,000 blocks and more and more holders."""
    rows, within = [], False
    for line in record.read_text().splitlines():
        if line.startswith("memory/holders of 100,000 blocks"):
            within = True
        elif within and (cells := re.match(r"^(\d+)\t([\d.]+)\t([\d.]+)\t", line)):
            rows.append([float(cell) for cell in cells.groups()])
        elif line.startswith("memory/"):
            within = False
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, column in (("base", 2), ("ours", 1)):
        count = [row[0] * 0.1 for row in rows]
        size = [row[0] * 0.1 * row[column] for row in rows]
        axes.plot(count, size, marker="o", color=COLORS[name], label=NAMES[name])
    axes.set(xscale="log", xlabel="million placements of 100,000 blocks", ylabel="megabytes")
    axes.set_ylim(bottom=0)
    axes.set_title("Memory, as more workers hold the same blocks")
    axes.legend(loc="upper left")
    save(figure, record, path)


def latency(record, path):
    """Percentiles of queries over gRPC against their rate."""
    rows = [line.split("\t") for line in lines(record) if line[0].isdigit()]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for column, name, shade in ((2, "p50", 1.0), (3, "p90", 0.75), (4, "p99", 0.5), (5, "p99.9", 0.3)):
        points = [(float(row[0]) / 1e3, float(row[column])) for row in rows]
        axes.plot(*zip(*points), marker="o", color=COLORS["ours"], alpha=shade, label=name)
    axes.set(yscale="log", xlabel="thousand queries a second, at fixed times", ylabel="microseconds")
    axes.set_title("Query over gRPC: 2,000 blocks, 64 holders, one processor for the server")
    axes.legend(loc="upper left")
    save(figure, record, path)


def main():
    records, images = Path(sys.argv[1]), Path(sys.argv[2])
    pictures = (("scan", "prompt-length", prompt_length), ("memory", "placements", placements),
                ("load", "latency", latency))
    for name, picture, draw in pictures:
        record = records / f"{name}.txt"
        if record.exists():
            draw(record, images / f"{picture}.svg")
        else:
            print(f"{record} is missing: no picture of it", file=sys.stderr)


main()
