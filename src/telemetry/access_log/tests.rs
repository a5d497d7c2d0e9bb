use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use prometheus::IntCounter;

use super::*;

fn settings(path: &Path) -> Settings {
    Settings { target: Target::File(path.to_owned()), format: Format::Json }
}

fn start(path: &Path) -> (Arc<AccessLog>, IntCounter) {
    let lost = IntCounter::new("lost", "lost").unwrap();
    (AccessLog::start(Output::open(settings(path)).unwrap(), lost.clone()).unwrap(), lost)
}

/// Appends numbered lines from several threads.
fn append(log: &Arc<AccessLog>, threads: usize, lines: usize) {
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for line in 0..lines {
                    log.append(|out, _| {
                        out.extend_from_slice(format!("{thread} {line} {}\n", "x".repeat(300)).as_bytes())
                    });
                }
            });
        }
    });
}

/// Which lines of each thread there are, in the order of the files.
fn lines_of(files: &[PathBuf], threads: usize) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new(); threads];
    for file in files {
        let text = fs::read_to_string(file).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        for line in text.lines() {
            let (thread, rest) = line.split_once(' ').unwrap();
            let (line, rest) = rest.split_once(' ').unwrap();
            assert_eq!(rest.len(), 300, "torn");
            found[thread.parse::<usize>().unwrap()].push(line.parse().unwrap());
        }
    }
    found
}

#[tokio::test]
async fn lines_are_written_whole_and_in_the_order_of_their_thread() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let (log, lost) = start(&path);
    append(&log, 8, 2000);
    log.end().await;
    let found = lines_of(&[path], 8);
    assert!(found.iter().all(|lines| lines.iter().copied().eq(0..2000)));
    assert_eq!(lost.get(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_under_load_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let (log, lost) = start(&path);
    let writing = {
        let log = Arc::clone(&log);
        thread::spawn(move || append(&log, 4, 20_000))
    };
    let mut files = Vec::new();
    while !writing.is_finished() && files.len() < 20 {
        let rotated = directory.path().join(format!("access.log.{}", files.len()));
        fs::rename(&path, &rotated).unwrap();
        files.push(rotated);
        log.reopen(settings(&path)).await.unwrap();
    }
    writing.join().unwrap();
    log.end().await;
    files.push(path);
    let found = lines_of(&files, 4);
    assert!(found.iter().all(|lines| lines.iter().copied().eq(0..20_000)));
    assert_eq!((lost.get(), files.len() > 1), (0, true));
}

/// A full disk takes nothing: what is appended then is kept up to the limit, and the rest is counted.
#[tokio::test]
async fn a_full_disk_stops_nobody_and_what_is_lost_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    let (log, lost) = start(Path::new("/dev/full"));
    let (lines, begun) = (2 * MAX_BUFFERED / 300, Instant::now());
    append(&log, 1, lines);
    assert!(begun.elapsed() < Duration::from_secs(10));
    let dropped = lost.get() as usize;
    assert!(dropped > 0 && dropped < lines);
    // The disk has room again.
    log.reopen(settings(&path)).await.unwrap();
    log.end().await;
    assert_eq!(lines_of(&[path], 1)[0].len() + dropped, lines);
    assert_eq!(lost.get() as usize, dropped);
}

#[tokio::test]
async fn what_cannot_be_written_before_the_end_is_counted() {
    let (log, lost) = start(Path::new("/dev/full"));
    append(&log, 2, 50);
    log.end().await;
    assert_eq!(lost.get(), 100);
}

#[test]
fn a_target_that_cannot_be_opened_is_named() {
    let error = Output::open(settings(Path::new("/nowhere/access.log"))).err().unwrap();
    assert_eq!(
        error.to_string(),
        "access_log.path: cannot open /nowhere/access.log: No such file or directory (os error 2)"
    );
}

#[test]
fn part_of_a_line_is_removed_only_where_nothing_follows_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("access.log");
    fs::write(&path, "one\ntw").unwrap();
    let mut output = Output::open(settings(&path)).unwrap();
    assert!(!output.remove(b"xx"));
    assert!(output.remove(b"tw") && !output.remove(b"a longer part than there is"));
    output.write(b"three\n").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "one\nthree\n");
}

#[tokio::test]
#[ignore = "takes long: `tests/run --long` runs it"]
async fn a_million_lines() {
    let directory = tempfile::tempdir().unwrap();
    for threads in [1, 2, 4] {
        let path = directory.path().join(format!("{threads}.log"));
        let (log, lost) = start(&path);
        let (begun, each) = (Instant::now(), 1_000_000 / threads);
        thread::scope(|scope| {
            for thread in 0..threads {
                let log = &log;
                scope.spawn(move || {
                    let filler = "x".repeat(300);
                    for line in 0..each {
                        // No faster than 250,000 lines a second.
                        let due = Duration::from_micros((4 * line * threads) as u64);
                        if line % 1000 == 0 {
                            thread::sleep(due.saturating_sub(begun.elapsed()));
                        }
                        log.append(|out, _| {
                            use std::io::Write as _;
                            writeln!(out, "{thread} {line} {filler}").unwrap();
                        });
                    }
                });
            }
        });
        let appended = begun.elapsed();
        log.end().await;
        let (appended, written, count) = (appended.as_secs_f64(), begun.elapsed().as_secs_f64(), lost.get());
        tracing::info!(threads, appended, written, count);
        assert_eq!(count, 0, "{threads} threads: {appended}");
        let found = lines_of(&[path], threads);
        assert!(found.iter().all(|lines| lines.iter().copied().eq(0..each)));
    }
}
