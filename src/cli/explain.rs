//! `oncegate explain`: what a gate would do with a request, and why, without one that runs.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use self::curl::{CurlArgs, Sent, Unsent};
use self::report::ExplainedRequest;
use super::{FileArgs, complain, configured, print};
use crate::config::{Flags, Sources};
use crate::gate::describe::explain::{Sample, explain};
use crate::idempotency::scope::ClientCertificate;

mod credential;
mod curl;
mod details;
mod policy;
mod report;

/// Say which route, policy, key, scope and fingerprint a request would have, and why; no gate has to run.
///
/// The request is written as for curl, whose command lines can mostly be pasted, with the word `curl` or without: GET, or
/// POST where there is a body; a body without a Content-Type counts as application/x-www-form-urlencoded. Only the headers
/// that are given count, and the Content-Length of the body. Flags that change nothing about the request are ignored, such
/// as -i, -s, -o, -f, --max-time, --retry and --http2.
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    #[command(flatten)]
    file: FileArgs,
    /// The only upstream, as for `oncegate serve`
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    #[command(flatten)]
    curl: CurlArgs,
    /// The client's address, where a scope has `client-ip`
    #[arg(long, value_name = "IP")]
    client_ip: Option<IpAddr>,
    /// The client's certificate in PEM, where a scope has `client-cert` or `credential`; its issuer is not verified here
    #[arg(long, value_name = "FILE")]
    client_cert: Option<PathBuf>,
}

/// Explains.
pub(super) fn run(args: ExplainArgs) -> anyhow::Result<ExitCode> {
    let Sent { head, body, type_is_default } = match args.curl.into_sent() {
        Ok(sent) => sent,
        Err(Unsent::Usage(message)) => {
            complain(&format!("error: {message}"));
            return Ok(ExitCode::from(super::WRONG_USAGE));
        }
        Err(Unsent::Failed(error)) => return Err(error),
    };
    let flags = Flags { upstream: args.upstream, ..Flags::default() };
    let config = match configured(Sources::of_process(args.file.config, flags)) {
        Ok(config) => config,
        Err(status) => return Ok(status),
    };
    let body = body.as_deref().unwrap_or_default();
    let head = announced(head, body);
    let request = ExplainedRequest { head: head.clone(), body, type_is_default };
    let sample = Sample {
        head,
        body: request.body,
        client_ip: args.client_ip,
        certificate: args.client_cert.as_deref().map(read_certificate).transpose()?.map(Arc::new),
        asks_certificate: config.server.accept.tls.as_ref().is_some_and(|tls| tls.files.client_ca.is_some()),
        is_secure: config.server.accept.tls.is_some(),
    };
    let explanation = explain(&config.gate, &config.router, sample);
    print(&report::write(&config, &request, &explanation))?;
    Ok(ExitCode::SUCCESS)
}

/// The head with the `Content-Length` of the body, which curl adds where no header tells where the body ends.
fn announced(mut head: Parts, body: &[u8]) -> Parts {
    if !body.is_empty() && !head.headers.contains_key(TRANSFER_ENCODING) {
        head.headers.entry(CONTENT_LENGTH).or_insert_with(|| body.len().into());
    }
    head
}

/// The first certificate of a file, which is the client's own.
fn read_certificate(file: &Path) -> anyhow::Result<ClientCertificate> {
    let read = CertificateDer::from_pem_file(file).ok().and_then(|der| ClientCertificate::of(&der));
    read.with_context(|| format!("{} cannot be read, or holds no certificate in PEM", file.display()))
}
