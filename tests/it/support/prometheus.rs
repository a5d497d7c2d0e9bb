//! A Prometheus of a test's own, which scrapes one gate.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::process::Process;
use super::upstream::Upstream;
use super::wait::eventually;
use super::{Request, Response};

pub struct Prometheus {
    address: SocketAddr,
    _process: Process,
}

impl Prometheus {
    /// Starts a server that scrapes `target` twice a second, as the job `oncegate`; nothing (and a failure where `CI`
    /// is set) where Prometheus is not installed. It gives up a scrape only when the next one is due.
    #[track_caller]
    pub fn start(target: SocketAddr) -> Option<Self> {
        if Command::new("prometheus").arg("--version").output().is_err() {
            crate::servers::skipped("prometheus");
            return None;
        }
        let dir = TempDir::new().expect("a directory");
        let config = format!(
            "global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}\n\
             scrape_configs: [{{job_name: oncegate, static_configs: [{{targets: [\"{target}\"]}}]}}]\n"
        );
        let file = dir.path().join("prometheus.yml");
        std::fs::write(&file, config).expect("a writable directory");
        let address = Upstream::free_address();
        let mut command = Command::new("prometheus");
        let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
        command.arg(option("config.file", &file)).arg(option("storage.tsdb.path", &dir.path().join("data")));
        command.arg(format!("--web.listen-address={address}"));
        let server = Self { address, _process: Process::start(command, dir) };
        eventually("Prometheus is ready", || (server.get("/-/ready")?.status == 200).then_some(()));
        Some(server)
    }

    /// The values of a query, with their labels.
    #[track_caller]
    pub fn query(&self, promql: &str) -> Vec<(Value, f64)> {
        let reply = self.get(&format!("/api/v1/query?query={}", encoded(promql))).expect("Prometheus answers");
        let reply = reply.json();
        assert_eq!(reply["status"], "success", "{promql}: {reply}");
        let sample = |sample: &Value| {
            let value = sample["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a number");
            (sample["metric"].clone(), value)
        };
        reply["data"]["result"].as_array().expect("a vector").iter().map(sample).collect()
    }

    fn get(&self, target: &str) -> Option<Response> {
        Request::get(target).header("Host", "prometheus").try_send(self.address)
    }
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}
