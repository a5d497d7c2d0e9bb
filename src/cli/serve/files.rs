//! How many files this process may have open, which connections are too; and the one that it does not write: its core.

use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Resolved;
use crate::http::spool;

/// Files besides the connections that are counted: the store, the admin listener, connections that are being refused,
/// temporary files of large bodies; and for each core, what its runtime has.
const OTHERS: u64 = 512;
const OTHERS_OF_A_CORE: u64 = 8;

/// Lets the process have as many as the system allows. Where those are too few for the connections of `[limits]`, clients
/// get fewer, so that they leave some to upstreams, the store and the admin listener.
pub(super) fn share_out(config: &mut Resolved) {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    // Without a maximum there may be any number.
    let allowed = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let Some(allowed) = allowed else { return };
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let needs = Needs {
        clients: config.server.limits.max_connections,
        upstreams: config.upstreams.iter().map(|upstream| upstream.max_connections).sum(),
        others: OTHERS + OTHERS_OF_A_CORE * cores,
    };
    let max_connections = needs.clients_of(allowed);
    if max_connections < needs.clients {
        tracing::warn!(
            allowed,
            needed = needs.clients + needs.upstreams + needs.others,
            max_connections,
            "the system allows this process too few open files for the connections of [limits]: max_connections is \
             lowered, so that clients leave some to upstreams, the store and the admin listener; raise the hard limit \
             (ulimit -Hn, LimitNOFILE=) or lower max_connections"
        );
        config.server.limits.max_connections = max_connections;
    }
}

/// Tells where large request bodies have no place.
pub(super) fn check_spool() {
    if let Err(error) = spool::new_file() {
        tracing::warn!(
            %error,
            "request bodies that have no room in memory get 503: name a directory that is writable in TMPDIR"
        );
    }
}

/// Has the system write no core of this process: its memory holds answers that it replays, and secrets. Where a core is
/// needed, `prlimit --core=unlimited --pid` allows it again.
pub(super) fn write_no_core() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Core);
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum }) {
        tracing::warn!(%error, "a crash of this process may leave a core file, which holds answers and secrets");
    }
}

/// How many files there may be of each kind.
struct Needs {
    clients: u64,
    upstreams: u64,
    others: u64,
}

impl Needs {
    /// How many clients may be connected where so many files are allowed: the rest, after other uses, of which there are never
    /// too few, they share with upstreams in proportion.
    fn clients_of(&self, allowed: u64) -> u64 {
        let connections = self.clients + self.upstreams;
        if connections + self.others <= allowed {
            return self.clients;
        }
        let shared = allowed - self.others.min(allowed / 3);
        (shared.saturating_mul(self.clients) / connections.max(1)).clamp(1, self.clients.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_files_to_others() {
        let needs = Needs { clients: 12_000, upstreams: 4_000, others: 500 };
        for (allowed, clients) in
            [(u64::MAX, 12_000), (16_500, 12_000), (16_499, 11_999), (8_500, 6_000), (1_200, 600), (300, 150), (1, 1)]
        {
            assert_eq!(needs.clients_of(allowed), clients, "{allowed}");
        }
        assert_eq!(Needs { clients: 10, upstreams: 0, others: 20 }.clients_of(25), 10);
    }
}
