//! What the README has to be pasted, run as it stands there.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::servers::certificates::can_be_made;
use crate::support::Process;

/// The commands of a section of the README, block by block.
fn blocks(section: &str) -> Vec<String> {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).expect("a README.md");
    let heading = format!("\n## {section}\n");
    let section = readme.split_once(&heading).unwrap_or_else(|| panic!("README.md has no section `{section}`")).1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default().to_owned());
    blocks.collect()
}

#[test]
fn the_readmes_quick_start() {
    if Command::new("python3").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "python3 is missing");
        eprintln!("skipped: python3 is missing, which the README's toy API needs");
        return;
    }
    let blocks = blocks("Quick start");
    let [serve, toy, pay, count, ..] = &blocks[..] else { panic!("{} blocks", blocks.len()) };

    // The ports of the text may be taken on a machine that runs other tests meanwhile: each takes one that is free, and
    // says which.
    let toy = toy.trim().strip_prefix("python3 ").expect("README.md starts a toy API with python3");
    let toy = Toy::start(toy);

    let dir = Arc::new(tempfile::tempdir().expect("a writable directory"));
    let serve = serve.replace("http://127.0.0.1:3000", &toy.api);
    let mut words = serve.split_whitespace();
    assert!(words.by_ref().any(|word| word == "--"), "README.md starts the gate by `cargo run … -- serve …`: {serve}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(words).args(["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    command.current_dir(dir.path());
    let process = Process::start(command, Arc::clone(&dir));
    let gate = process
        .wait_for_log(|line| line.split_once(": listening address=127.0.0.1:").map(|(_, port)| port.trim().to_owned()))
        .expect("it serves");
    let [pay, count] = [pay, count].map(|block| block.replace(":8080", &format!(":{gate}")));

    let answers = shell(&pay);
    assert_eq!(answers.matches("\"id\": \"ch_1\"").count(), 2, "{answers}");
    assert_eq!(answers.to_lowercase().matches("idempotent-replayed: true").count(), 1, "{answers}");
    let (first, second) = answers.rsplit_once("HTTP/1.1 201").expect("two answers");
    assert!(first.contains("executed") && second.contains("replayed"), "{answers}");
    assert!(shell(&count).contains("{\"charges\": 1}"));
    assert!(dir.path().join("oncegate.db").exists());
    // Its path is said, and so is where it stands.
    assert!(process.log().contains(&dir.path().join("oncegate.db").display().to_string()), "{}", process.log());
}

#[test]
fn the_readmes_gate_that_encrypts() {
    if Command::new("python3").arg("--version").output().is_err() || !can_be_made() {
        assert!(std::env::var_os("CI").is_none(), "python3 is missing");
        return;
    }
    let blocks = blocks("TLS, HTTP/2, unix sockets and the PROXY protocol");
    let [prepare, pay, ..] = &blocks[..] else { panic!("{} blocks", blocks.len()) };
    let toy = Toy::start("deploy/examples/payments.py");
    let dir = Arc::new(tempfile::tempdir().expect("a writable directory"));
    let (prepare, serve) = prepare.trim().rsplit_once('\n').expect("several commands");
    shell_in(dir.path(), &prepare.replace("http://127.0.0.1:3000", &toy.api).replace(":8443", ":0"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(serve.split_whitespace().skip(1)).args(["--admin", "127.0.0.1:0"]).current_dir(dir.path());
    let process = Process::start(command, Arc::clone(&dir));
    let gate = process
        .wait_for_log(|line| line.split_once(": listening address=127.0.0.1:").map(|(_, port)| port.trim().to_owned()))
        .expect("it serves");
    process
        .wait_for_log(|line| line.trim_end().ends_with(": listening address=unix:gate.sock").then_some(()))
        .expect("both");
    let pay = pay.replace("https://localhost:8443", &format!("https://localhost:{gate}"));
    // The host, with its port, is part of whom a key belongs to.
    let answers = shell_in(dir.path(), &pay.replace("http://localhost:8443", &format!("http://localhost:{gate}")));
    assert_eq!(answers.matches("HTTP/2 201").count(), 2, "{answers}");
    let (first, second) = answers.rsplit_once("HTTP/2 201").expect("two answers");
    assert!(first.contains("executed") && second.contains("idempotent-replayed: true"), "{answers}");
}

/// The toy API of the examples, on a port that is free.
struct Toy {
    process: Child,
    api: String,
}

impl Toy {
    fn start(script: &str) -> Self {
        let mut process = Command::new("python3")
            .args(script.split_whitespace())
            .arg("0")
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3");
        let mut said = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut said).expect("a line");
        let api = said.trim().strip_prefix("payments on ").expect("the toy API says where it is").to_owned();
        Self { process, api }
    }
}

impl Drop for Toy {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn shell(commands: &str) -> String {
    shell_in(Path::new("."), commands)
}

fn shell_in(directory: &Path, commands: &str) -> String {
    let mut command = Command::new("bash");
    let done = command.args(["-euc", commands]).current_dir(directory).stdin(Stdio::null()).output().expect("bash");
    assert!(done.status.success(), "{commands}\n{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}
