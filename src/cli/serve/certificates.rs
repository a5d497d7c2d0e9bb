//! Certificates that are renewed while the gate serves.

use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::admin;
use crate::config::reread_tls;
use crate::gate::Gate;
use crate::http::accept::{AcceptSettings, ServerTls, TlsFiles};
use crate::http::server::{Current, ServerState};

/// How often to look whether a file has changed.
const LOOK: Duration = Duration::from_secs(1);

/// What tells one state of the files from another.
type State = Vec<Option<(u64, u64, i64, i64)>>;

/// Takes up the new certificates of the clients' listeners.
pub(super) async fn follow(current: Current<Gate>) {
    let files = || current.load().accept.tls.as_ref().map(|secure| secure.files.clone());
    take_up(files, |secure| replace(&current, secure)).await;
}

/// Takes up the new certificates of the admin listener.
pub(super) async fn follow_admin(state: Arc<admin::State>) {
    take_up(|| state.tls_files(), |secure| state.renew_certificates(&secure)).await;
}

/// Takes up new certificates when their files change, for connections that are opened from then on. Those of files that
/// cannot be used are left, and that is said once.
async fn take_up(files: impl Fn() -> Option<TlsFiles>, replace: impl Fn(ServerTls)) {
    // Those in use were read before the gate waited for its store, perhaps for days: they are read once more.
    let (mut known, mut seen) = (None, files().map(|files| (state(&files), files)));
    loop {
        sleep(LOOK).await;
        let now = files().map(|files| (state(&files), files));
        // The certificate and its key are not written at once: only what has been the same for a while is read.
        let is_settled = std::mem::replace(&mut seen, now.clone()) == now;
        if !is_settled || now == known {
            continue;
        }
        let is_first = known.is_none();
        known.clone_from(&now);
        let Some((_, files)) = now else { continue };
        let reading = files.clone();
        match tokio::task::spawn_blocking(move || reread_tls(&reading)).await {
            Ok(Ok((config, warnings))) => {
                let cert = files.cert.clone();
                replace(ServerTls { files, config });
                if !is_first {
                    tracing::info!(cert = %cert.display(), "new certificates are in use");
                }
                for warning in warnings {
                    tracing::warn!(cert = %cert.display(), "{warning}");
                }
            }
            Ok(Err(error)) => {
                tracing::error!(error, "new certificates cannot be used: the gate goes on with the former ones")
            }
            Err(_) => tracing::error!("reading new certificates failed: the gate goes on with the former ones"),
        }
    }
}

fn replace(current: &Current<Gate>, secure: ServerTls) {
    current.rcu(|serving| ServerState {
        handler: Arc::clone(&serving.handler),
        limits: serving.limits.clone(),
        usage: Arc::clone(&serving.usage),
        accept: match &serving.accept.tls {
            // A configuration that names others came first.
            Some(named) if named.files == secure.files => {
                Arc::new(AcceptSettings { tls: Some(secure.clone()), ..AcceptSettings::clone(&serving.accept) })
            }
            _ => Arc::clone(&serving.accept),
        },
    });
}

fn state(files: &TlsFiles) -> State {
    let files = [Some(&files.cert), Some(&files.key), files.client_ca.as_ref(), files.client_crl.as_ref()];
    let of = |file: &std::path::PathBuf| {
        let metadata = std::fs::metadata(file).ok()?;
        Some((metadata.ino(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    };
    files.into_iter().flatten().map(of).collect()
}
