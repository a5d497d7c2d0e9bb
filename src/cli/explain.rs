//! `oncegate explain`: what a gate would do with a request, and why, without one that runs.

use std::io::Read as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use http::header::{CONTENT_TYPE, HOST};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use self::report::ExplainedRequest;
use super::{FileArgs, complain, configured, print};
use crate::config::{Flags, Sources};
use crate::gate::explain::{Question, explain};
use crate::idempotency::scope::ClientCertificate;

mod policy;
mod report;

/// Say which route, policy, key, scope and fingerprint a request would have, and why; no gate has to run.
///
/// The request is written as for curl, whose command lines can mostly be pasted: GET, or POST where there is a body;
/// a body without a Content-Type counts as application/x-www-form-urlencoded. Only the headers that are given count.
#[derive(Args, Debug)]
pub(super) struct ExplainArgs {
    #[command(flatten)]
    file: FileArgs,
    /// The only upstream, as for `oncegate serve`, where no file names one
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// The method [default: GET, or POST with -d]
    #[arg(short = 'X', long = "request", value_name = "METHOD")]
    method: Option<Method>,
    /// A header; may be repeated. As for curl, `Name:` is not sent, and `Name;` is sent empty
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", value_parser = parse_header)]
    headers: Vec<Header>,
    /// The body, @FILE to read it from a file, or @- from standard input. Several are joined with `&`
    #[arg(short = 'd', long = "data", value_name = "BODY|@FILE", allow_hyphen_values = true)]
    data: Vec<String>,
    /// The client's address, where a scope has `client-ip`
    #[arg(long, value_name = "IP")]
    client_ip: Option<IpAddr>,
    /// The client's certificate in PEM, where a scope has `client-cert` or `credential`; its issuer is not verified here
    #[arg(long, value_name = "FILE")]
    client_cert: Option<PathBuf>,
    /// The path with its query, or a whole URL, which names the host too
    #[arg(value_name = "PATH", value_parser = parse_target)]
    target: Uri,
}

/// A header to be sent, or not to be sent.
type Header = (HeaderName, Option<HeaderValue>);

/// Explains.
pub(super) fn run(args: ExplainArgs) -> anyhow::Result<ExitCode> {
    let flags = Flags { upstream: args.upstream, ..Flags::default() };
    let config = match configured(Sources::of_process(args.file.config, flags)) {
        Ok(config) => config,
        Err(status) => return Ok(status),
    };
    if args.target.authority().is_some() && args.headers.iter().any(|(name, _)| *name == HOST) {
        complain("error: the URL names the host already: leave out the Host header, or give the path alone");
        return Ok(ExitCode::from(2));
    }
    let body = read_body(&args.data)?;
    let method = args.method.unwrap_or(if body.is_some() { Method::POST } else { Method::GET });
    let type_is_ours = body.is_some() && args.headers.iter().all(|(name, _)| *name != CONTENT_TYPE);
    let head = head(method, args.target, args.headers, type_is_ours)?;
    let request = ExplainedRequest {
        head: head.clone(),
        body: body.as_deref().unwrap_or_default(),
        type_is_ours,
        from_file: args.data.iter().any(|data| data.starts_with('@')),
    };
    let question = Question {
        head,
        body: request.body,
        client_ip: args.client_ip,
        certificate: args.client_cert.as_deref().map(read_certificate).transpose()?.map(Arc::new),
        asks_certificate: config.server.accept.tls.as_ref().is_some_and(|tls| tls.files.client_ca.is_some()),
        is_secure: config.server.accept.tls.is_some(),
    };
    let explanation = explain(&config.gate, &config.router, question);
    print(&report::write(&config, &request, &explanation))?;
    Ok(ExitCode::SUCCESS)
}

/// The head of the request, as curl would send it: a URL's host goes into `Host`. A client of HTTP/1.1 names the host;
/// where it is not known, the request is of a version that need not.
fn head(method: Method, target: Uri, headers: Vec<Header>, type_is_ours: bool) -> anyhow::Result<Parts> {
    let (host, target) = match (target.authority(), target.path_and_query()) {
        (Some(host), Some(path)) => (Some(HeaderValue::from_str(host.as_str())?), Uri::from(path.clone())),
        _ => (None, target),
    };
    let mut lines: HeaderMap = host.into_iter().map(|host| (HOST, host)).collect();
    for (name, value) in headers {
        if let Some(value) = value {
            lines.append(name, value);
        }
    }
    if type_is_ours {
        lines.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
    }
    let version = if lines.contains_key(HOST) { Version::HTTP_11 } else { Version::HTTP_10 };
    let request = Request::builder().method(method).uri(target).version(version).body(());
    let mut head = request.context("this is not a request")?.into_parts().0;
    head.headers = lines;
    Ok(head)
}

/// The body, or nothing where none is sent.
fn read_body(data: &[String]) -> anyhow::Result<Option<Vec<u8>>> {
    let mut pieces = Vec::new();
    for piece in data {
        pieces.push(match piece.strip_prefix('@') {
            None => piece.clone().into_bytes(),
            Some("-") => {
                let mut input = Vec::new();
                std::io::stdin().lock().read_to_end(&mut input).context("cannot read the body of standard input")?;
                input
            }
            Some(file) => std::fs::read(file).with_context(|| format!("cannot read the body of {file}"))?,
        });
    }
    Ok((!pieces.is_empty()).then(|| pieces.join(&b'&')))
}

/// The first certificate of a file, which is the client's own.
fn read_certificate(file: &Path) -> anyhow::Result<ClientCertificate> {
    let read = CertificateDer::from_pem_file(file).ok().and_then(|der| ClientCertificate::of(&der));
    read.with_context(|| format!("{} cannot be read, or holds no certificate in PEM", file.display()))
}

fn parse_header(text: &str) -> Result<Header, String> {
    let name = |name: &str| {
        let wrong = || format!("`{}` is not a header name", name.trim());
        HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| wrong())
    };
    match text.split_once(':') {
        Some((this, value)) if value.trim().is_empty() => Ok((name(this)?, None)),
        Some((this, value)) => {
            // It may be a secret.
            let value = HeaderValue::from_bytes(value.trim().as_bytes()).map_err(|_| "not a header's value")?;
            Ok((name(this)?, Some(value)))
        }
        None => match text.strip_suffix(';') {
            Some(this) => Ok((name(this)?, Some(HeaderValue::from_static("")))),
            None => Err("a header is written as 'Name: value'".to_owned()),
        },
    }
}

fn parse_target(text: &str) -> Result<Uri, String> {
    let is_url = text.starts_with("http://") || text.starts_with("https://");
    if !is_url && !text.starts_with('/') && text != "*" {
        return Err("write a path that starts with `/`, or a URL that starts with `http://`".to_owned());
    }
    match text.parse::<Uri>() {
        Ok(target) if target.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
            Err("write the user and the password as -H 'Authorization: Basic ...'".to_owned())
        }
        Ok(target) => Ok(target),
        Err(_) => Err("it has characters that stand in no request as they are: percent-encode them".to_owned()),
    }
}

#[cfg(test)]
mod tests;
