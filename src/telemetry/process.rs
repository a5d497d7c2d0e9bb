//! The metrics of the process, under the names that Prometheus clients share.
//!
//! The collector of the `prometheus` crate is not used: it counts whole seconds of CPU time, and reads `/proc/stat` for the
//! start, which a unit with `ProcSubset=pid` hides.

use std::fs;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus::{Counter, Gauge, IntGauge, Registry};
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::register::{add, gauge};

/// The field of `/proc/self/stat` behind the program's name, which may have spaces and parentheses, that has the number of
/// threads, and the one that has the start (proc_pid_stat(5)).
const THREADS: usize = 17;
const START: usize = 19;

/// What this process uses of the machine.
pub(super) struct Process {
    cpu: Mutex<Counter>,
    start: Gauge,
    resident: IntGauge,
    size: IntGauge,
    open_files: IntGauge,
    max_files: IntGauge,
    threads: IntGauge,
}

impl Process {
    pub(super) fn new(registry: &Registry) -> Self {
        let cpu = "Total user and system CPU time spent in seconds.";
        let start = "Start time of the process since unix epoch in seconds.";
        let process = Self {
            cpu: Mutex::new(add(registry, Counter::new("process_cpu_seconds_total", cpu))),
            start: add(registry, Gauge::new("process_start_time_seconds", start)),
            resident: gauge(registry, "process_resident_memory_bytes", "Resident memory size in bytes."),
            size: gauge(registry, "process_virtual_memory_bytes", "Virtual memory size in bytes."),
            open_files: gauge(registry, "process_open_fds", "Number of open file descriptors."),
            max_files: gauge(registry, "process_max_fds", "Maximum number of open file descriptors."),
            threads: gauge(registry, "process_threads", "Number of OS threads in the process."),
        };
        if let Some(start) = stat(START).and_then(started_at) {
            process.start.set(start);
        }
        process
    }

    /// Reads them anew. What the system does not tell stays as it was.
    pub(super) fn refresh(&self) {
        let spent = clock_gettime(ClockId::ProcessCPUTime);
        let cpu = self.cpu.lock().unwrap_or_else(PoisonError::into_inner);
        cpu.inc_by((seconds(spent.tv_sec, spent.tv_nsec) - cpu.get()).max(0.0));
        drop(cpu);
        if let Some([size, resident]) = pages() {
            self.size.set(bytes(size));
            self.resident.set(bytes(resident));
        }
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            // One of them is the directory itself.
            self.open_files.set(i64::try_from(files.count()).unwrap_or(i64::MAX) - 1);
        }
        let limit = getrlimit(Resource::Nofile).current;
        self.max_files.set(limit.map_or(i64::MAX, |limit| i64::try_from(limit).unwrap_or(i64::MAX)));
        if let Some(threads) = stat(THREADS) {
            self.threads.set(i64::try_from(threads).unwrap_or(i64::MAX));
        }
    }
}

/// All of the process's memory, and what of it is resident, in pages.
fn pages() -> Option<[u64; 2]> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let mut words = text.split(' ').map(|word| word.parse().ok());
    Some([words.next()??, words.next()??])
}

fn bytes(pages: u64) -> i64 {
    i64::try_from(pages.saturating_mul(page_size() as u64)).unwrap_or(i64::MAX)
}

/// A field of `/proc/self/stat`, counted from the one behind the program's name.
fn stat(field: usize) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/stat").ok()?;
    let (_, fields) = text.rsplit_once(") ")?;
    fields.split(' ').nth(field)?.parse().ok()
}

/// When the process started, in seconds since 1970. `ticks` count from the start of the machine.
fn started_at(ticks: u64) -> Option<f64> {
    let up = clock_gettime(ClockId::Boottime);
    let age = seconds(up.tv_sec, up.tv_nsec) - Duration::from_secs(ticks).as_secs_f64() / per_second();
    Some(SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64() - age)
}

#[expect(clippy::cast_precision_loss, reason = "there are a hundred of them in a second")]
fn per_second() -> f64 {
    clock_ticks_per_second() as f64
}

#[expect(clippy::cast_precision_loss, reason = "2^52 seconds are not reached")]
fn seconds(whole: i64, nanos: i64) -> f64 {
    whole as f64 + nanos as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Instant;

    use super::*;

    fn value(registry: &Registry, name: &str) -> f64 {
        let families = registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a family");
        let metric = &family.get_metric()[0];
        metric.get_gauge().get_value() + metric.get_counter().get_value()
    }

    #[test]
    fn it_reads_what_the_process_uses() {
        let registry = Registry::new();
        let process = Process::new(&registry);
        let read = |name: &str| {
            process.refresh();
            value(&registry, name)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let start = read("process_start_time_seconds");
        assert!(start <= now && start > now - 24.0 * 3600.0, "{start} {now}");
        assert!(read("process_resident_memory_bytes") > 1e6);
        assert!(read("process_virtual_memory_bytes") >= read("process_resident_memory_bytes"));
        assert!(read("process_threads") >= 1.0);
        assert!(read("process_max_fds") > 3.0);
        // Other tests open and close files meanwhile.
        let files: Vec<_> = (0..200).map(|_| File::open("/dev/null").unwrap()).collect();
        let open = read("process_open_fds");
        assert!(open > 200.0, "{open}");
        drop(files);
        let (before, began) = (read("process_cpu_seconds_total"), Instant::now());
        while began.elapsed() < Duration::from_millis(20) {}
        let after = read("process_cpu_seconds_total");
        assert!(after > before && after.fract() > 0.0, "{before} {after}");
    }
}
