"""New keys for many minutes, with a ttl so short that the sweeper removes as many as come: nothing may grow."""

import statistics
import time

from load import NEW, result_of
from processes import Failed

MIB = 1 << 20
EVERY = 5  # seconds between two samples

# What counts as flat: the slope over the second half of the run, times that half's length, is at most this share of
# the half's mean, or so many MiB where the mean is small.
SHARE, LEAST_MIB = 0.05, 2


def soak(gate, loads, minutes, connections, ttl):
    """Prints samples while it runs. True if memory and file stay flat, and nothing failed."""
    seconds = minutes * 60
    print(
        f"\n{gate.name} on {gate.store.name}: new keys at {connections} connections for {minutes} min, ttl {ttl}\n\n"
        "| minute | requests/s | memory MiB | store MiB | records | swept |\n"
        "| -----: | ---------: | ---------: | --------: | ------: | ----: |",
        flush=True,
    )
    samples = []
    with loads.start(gate.port, NEW, f"soak-{loads.tag}", connections, seconds) as process:
        try:
            start = time.monotonic()
            while process.poll() is None:
                time.sleep(max(0, start + EVERY * (len(samples) + 1) - time.monotonic()))
                samples.append(sample(gate, time.monotonic() - start))
                if len(samples) % (60 // EVERY) == 0:
                    print(line(samples[-60 // EVERY - 1:] if len(samples) > 60 // EVERY else samples), flush=True)
            output = process.communicate()[0]
        except BaseException:
            process.kill()
            raise
    said = result_of(output, process.returncode)
    # wrk has ended by the last sample.
    return judge(samples[:-1], said, gate)


def sample(gate, at):
    if not gate.server.alive():
        raise Failed(f"{gate.server.name} died:\n{gate.server.tail()}")
    metrics = gate.metrics()
    return {
        "at": at,
        "requests": gate.outcomes(metrics).get("executed", 0),
        "memory": gate.server.memory()[0],
        "store": gate.store.size(),
        "records": sum(value for name, value in metrics.items() if name.startswith("oncegate_records{")),
        "swept": metrics.get("oncegate_records_swept_total", 0),
    }


def line(samples):
    first, last = samples[0], samples[-1]
    rate = (last["requests"] - first["requests"]) / max(last["at"] - first["at"], 1e-9)
    return (
        f"| {last['at'] / 60:6.1f} | {rate:10,.0f} | {last['memory'] / MIB:10.1f} | {last['store'] / MIB:9.1f} "
        f"| {last['records']:7,.0f} | {last['swept']:5,.0f} |"
    )


def judge(samples, said, gate):
    half = samples[len(samples) // 2:]
    if len(half) < 6:
        raise Failed("too few samples to judge by: soak for longer")
    good = True
    print()
    for what in ("memory", "store"):
        values = [one[what] / MIB for one in half]
        if max(values) == 0:
            continue
        slope = statistics.linear_regression([one["at"] / 60 for one in half], values).slope
        span = (half[-1]["at"] - half[0]["at"]) / 60
        allowed = max(statistics.mean(values) * SHARE, LEAST_MIB)
        flat = slope * span <= allowed
        good &= flat
        print(
            f"{what}: {'flat' if flat else 'NOT FLAT'}: {slope:+.2f} MiB a minute over the last {span:.1f} min, "
            f"{min(values):.1f} to {max(values):.1f} MiB"
        )
    rates = [(b["requests"] - a["requests"]) / (b["at"] - a["at"]) for a, b in zip(samples, samples[1:])]
    print(
        f"rate: {said['requests'] / said['microseconds'] * 1e6:,.0f}/s on the whole, {min(rates):,.0f} to "
        f"{max(rates):,.0f}/s over {EVERY} s; p50 {said['p50'] / 1e3:.2f}, p99 {said['p99'] / 1e3:.2f}, p99.9 "
        f"{said['p999'] / 1e3:.2f}, slowest {said['max'] / 1e3:.0f} ms"
    )
    if samples[-1]["swept"] == 0:
        good = False
        print("WRONG: nothing was swept, so this shows nothing")
    wrong = {name: said[name] for name in ("connect", "read", "write", "timeout", "status") if said[name]}
    others = {name: count for name, count in gate.outcomes().items() if name != "executed"}
    if wrong or others:
        good = False
        print(f"WRONG: errors {wrong}, outcomes {others}")
    return good
