//! `oncegate demo`, as a newcomer runs it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long the whole demo may take on a machine that is busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);

struct Demo {
    child: Child,
    /// Where it makes its temporary directory.
    dir: TempDir,
}

impl Demo {
    fn start(args: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a writable directory");
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.arg("demo").args(args).env("TMPDIR", dir.path()).stdin(Stdio::null());
        // What is set for gates does not reach the demo's.
        command.env("ONCEGATE_STORE__URL", "memory:").env("ONCEGATE_SERVER__LISTEN", "192.0.2.1:1");
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        Self { child, dir }
    }

    /// Waits for its end, and gives what is left to read of its output.
    #[track_caller]
    fn end(&mut self, patience: Duration) -> (ExitStatus, String, String) {
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let out = std::thread::spawn(|| stdout.map(read).unwrap_or_default());
        let errors = std::thread::spawn(|| stderr.map(read).unwrap_or_default());
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            assert!(began.elapsed() < patience, "it does not end within {patience:?}");
            std::thread::sleep(Duration::from_millis(20));
        };
        (status, out.join().expect("its output"), errors.join().expect("its errors"))
    }

    /// Reads on until a line begins like this.
    #[track_caller]
    fn read_until(&mut self, beginning: &str) {
        let mut lines = BufReader::new(self.child.stdout.as_mut().expect("piped"));
        let mut line = String::new();
        while !line.starts_with(beginning) {
            line.clear();
            assert_ne!(lines.read_line(&mut line).expect("text"), 0, "no line begins with {beginning:?}");
        }
    }

    #[track_caller]
    fn expect_nothing_left(&self) {
        let left: Vec<_> = std::fs::read_dir(self.dir.path()).expect("a directory").collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn read(mut from: impl std::io::Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).expect("a pipe");
    String::from_utf8(bytes).expect("UTF-8")
}

/// The three cells of a line of the table.
#[track_caller]
fn row(output: &str, name: &str) -> [u32; 3] {
    let line =
        output.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}:\n{output}"));
    let cells: Vec<u32> = line.split_whitespace().map(|cell| cell.parse().expect("a number")).collect();
    cells.try_into().expect("three cells")
}

#[test]
fn nobody_is_charged_twice_through_the_gate() {
    let mut demo = Demo::start(&["--fast"]);
    let (status, output, errors) = demo.end(PATIENCE);
    assert!(status.success(), "{status}\n{output}\n{errors}");
    assert_eq!(errors, "");
    demo.expect_nothing_left();

    let [without, with, settled] = row(&output, "charged twice or more ");
    assert!(without >= 3, "the customers whose payments are told are among them:\n{output}");
    assert_eq!((with, settled), (0, 0), "{output}");
    assert_eq!(row(&output, "customers "), [120, 120, 120]);
    assert_eq!(row(&output, "charged once ")[2], 120, "{output}");
    assert_eq!(row(&output, "not charged ")[2], 0, "{output}");
    let [_, open, left] = row(&output, "  left open, for a person ");
    assert!(open >= 3 && left == 0, "{output}");
    assert!(output.contains(&format!("Without oncegate {without} of 120 customers were charged twice or more.\n")));

    // Piped to a file, it is plain text for 80 columns.
    let plain = |c: char| c == '\n' || (c.is_ascii() && !c.is_ascii_control());
    assert!(output.chars().all(plain), "{output}");
    let wide: Vec<_> = output.lines().filter(|line| line.len() > 80).collect();
    assert!(wide.is_empty(), "{wide:?}");
}

#[test]
fn it_ends_at_once_when_it_is_interrupted() {
    let mut demo = Demo::start(&["--customers", "10"]);
    demo.read_until("1. ");
    let pid = i32::try_from(demo.child.id()).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("a child");
    let (status, _, errors) = demo.end(Duration::from_secs(20));
    assert_eq!((status.code(), errors.as_str()), (Some(1), "oncegate: interrupted\n"));
    demo.expect_nothing_left();
}

#[test]
fn it_ends_when_nobody_reads_on() {
    let mut demo = Demo::start(&["--fast"]);
    demo.read_until("1. ");
    drop(demo.child.stdout.take());
    let (status, _, errors) = demo.end(Duration::from_secs(20));
    assert_eq!((status.code(), errors.as_str()), (Some(0), ""));
    demo.expect_nothing_left();
}

#[test]
fn what_is_missing_is_said() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let output = command.args(["demo", "--fast"]).env("TMPDIR", "/nonexistent").output().expect("the binary starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("TMPDIR") && errors.contains("/nonexistent"), "{errors}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let usage = command.args(["demo", "--customers", "9"]).output().expect("the binary starts");
    assert_eq!(usage.status.code(), Some(2));
}
