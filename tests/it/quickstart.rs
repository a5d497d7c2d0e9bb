//! The README's quick start, run as it stands there.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::support::gate::Process;
use crate::support::{Request, eventually};

/// The commands of the README's quick start, block by block.
fn blocks() -> Vec<String> {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).expect("a README.md");
    let section = readme.split_once("\n## Quick start\n").expect("README.md has a section `Quick start`").1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default().to_owned());
    blocks.collect()
}

/// A port that is free now.
fn free_port() -> String {
    let probe = TcpListener::bind("127.0.0.1:0").expect("a free port");
    probe.local_addr().expect("a bound socket").port().to_string()
}

#[test]
fn the_readmes_quick_start() {
    if Command::new("python3").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "python3 is missing");
        eprintln!("skipped: python3 is missing, which the README's toy API needs");
        return;
    }
    // The ports of the text may be taken on a machine that runs other tests meanwhile.
    let (api, gate) = (free_port(), free_port());
    let blocks: Vec<String> =
        blocks().iter().map(|block| block.replace("127.0.0.1:3000", &format!("127.0.0.1:{api}"))).collect();
    let blocks: Vec<String> = blocks.iter().map(|block| block.replace(":8080", &format!(":{gate}"))).collect();
    let [serve, toy, pay, count, ..] = &blocks[..] else { panic!("{} blocks", blocks.len()) };

    let dir = Arc::new(tempfile::tempdir().expect("a writable directory"));
    let mut words = serve.split_whitespace();
    assert!(words.by_ref().any(|word| word == "--"), "README.md starts the gate by `cargo run … -- serve …`: {serve}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(words).args(["--listen", &format!("127.0.0.1:{gate}"), "--admin", "127.0.0.1:0"]);
    command.current_dir(dir.path());
    let process = Process::start(command, Some(Arc::clone(&dir)));
    process.wait_for_log(|line| (line.contains("listening") && line.contains(&gate)).then_some(())).expect("it serves");

    let toy = toy.trim().strip_prefix("python3 ").expect("README.md starts a toy API with python3");
    let mut toy = Toy(Command::new("python3")
        .args(toy.split_whitespace())
        .arg(&api)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdout(Stdio::null())
        .spawn()
        .expect("python3"));
    let address = format!("127.0.0.1:{api}").parse().expect("an address");
    eventually("the toy API", || Request::get("/").try_send(address).map(drop));

    let answers = shell(pay);
    assert_eq!(answers.matches("\"id\": \"ch_1\"").count(), 2, "{answers}");
    assert_eq!(answers.to_lowercase().matches("idempotent-replayed: true").count(), 1, "{answers}");
    let (first, second) = answers.rsplit_once("HTTP/1.1 201").expect("two answers");
    assert!(first.contains("executed") && second.contains("replayed"), "{answers}");
    assert!(shell(count).contains("{\"charges\": 1}"));
    assert!(dir.path().join("oncegate.db").exists());
    // Its path is said, and so is where it stands.
    assert!(process.log().contains(&dir.path().join("oncegate.db").display().to_string()), "{}", process.log());
    toy.0.kill().expect("a child");
}

struct Toy(Child);

impl Drop for Toy {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn shell(commands: &str) -> String {
    let done = Command::new("bash").args(["-euc", commands]).stdin(Stdio::null()).output().expect("bash");
    assert!(done.status.success(), "{commands}\n{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}
