//! Where the process listens.

use std::net::SocketAddr;

use anyhow::{Context as _, bail};
use tokio::net::TcpListener;

use crate::admin;

pub(super) async fn bind(address: SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        let flag = if what == "admin" { "--admin" } else { "--listen" };
        format!("[{what}] listen: cannot listen on {address}; {flag} ADDR gives another one")
    })
}

/// Holds that the admin listener, at this address, has a token where others than this machine reach it.
pub(super) fn admin_is_guarded(address: SocketAddr, settings: &admin::Settings) -> anyhow::Result<()> {
    if address.ip().to_canonical().is_loopback() || settings.token.is_some() {
        return Ok(());
    }
    bail!(
        "[admin] token_file: the admin listener is at {address}, which is not a loopback address, so the records API needs \
         a token\n  hint: name a file that holds one"
    )
}
