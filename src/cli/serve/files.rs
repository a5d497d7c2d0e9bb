//! How many files this process may have open, which connections are too; and the one that it does not write: its core.

use std::thread;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::Resolved;
use crate::http::spool;

/// At least so many files are kept for other uses, as long as that leaves a quarter to connections. An idle gate has about 40 open.
const FEWEST_OTHERS: u64 = 64;

/// Files besides the connections that are counted: the store, the admin listener, connections that are being refused,
/// temporary files of large bodies; and for each core, what its runtime has.
const OTHERS: u64 = 512;
const OTHERS_OF_A_CORE: u64 = 8;

/// Lets the process have as many as the system allows. Where those are too few for the connections of `[limits]` and of the
/// upstreams, both get fewer, so that they leave some to each other, the store and the admin listener.
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
    let (max_connections, needed) =
        (needs.share(needs.clients, allowed), needs.clients + needs.upstreams + needs.others);
    if allowed < needed {
        tracing::warn!(
            allowed,
            needed,
            max_connections,
            of_upstreams = needs.share(needs.upstreams, allowed),
            "the system allows this process too few open files for the connections of [limits] and of the upstreams: \
             max_connections is lowered for both, so that they leave some to each other, the store and the admin listener; \
             raise the hard limit (ulimit -Hn, LimitNOFILE=) or lower max_connections"
        );
        config.server.limits.max_connections = max_connections;
        for upstream in &mut config.upstreams {
            upstream.max_connections = needs.share(upstream.max_connections, allowed);
        }
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
    /// How many of `wanted` connections there may be where so many files are allowed: all connections share the rest, after other
    /// uses, in proportion.
    fn share(&self, wanted: u64, allowed: u64) -> u64 {
        let connections = self.clients + self.upstreams;
        if connections + self.others <= allowed {
            return wanted;
        }
        let shared = allowed - self.others.min((allowed / 3).max(FEWEST_OTHERS.min(allowed * 3 / 4)));
        (shared.saturating_mul(wanted) / connections.max(1)).clamp(1, wanted.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_and_upstreams_leave_files_to_others() {
        let needs = Needs { clients: 12_000, upstreams: 4_000, others: 500 };
        for (allowed, clients, upstreams) in [
            (u64::MAX, 12_000, 4_000),
            (16_500, 12_000, 4_000),
            (16_499, 11_999, 3_999),
            (8_500, 6_000, 2_000),
            (1_200, 600, 200),
            (300, 150, 50),
            (128, 48, 16),
            (64, 12, 4),
            (1, 1, 1),
        ] {
            assert_eq!((needs.share(12_000, allowed), needs.share(4_000, allowed)), (clients, upstreams), "{allowed}");
        }
        assert_eq!(Needs { clients: 10, upstreams: 0, others: 20 }.share(10, 29), 9);
    }
}
