//! The request that a command line of curl describes.

use std::io::Read as _;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use http::header::{ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, COOKIE, HOST, REFERER, USER_AGENT};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};

use self::other_flags::OtherFlags;

mod other_flags;

/// The flags of curl that describe the request, and those that are accepted because command lines have them.
///
/// Values that may be secrets are not parsed by clap, which would show them in its errors.
#[derive(Args, Debug)]
pub(super) struct CurlArgs {
    /// The method [default: GET, or POST with a body]
    #[arg(short = 'X', long = "request", value_name = "METHOD", overrides_with = "method")]
    method: Option<Method>,
    /// A header; may be repeated. As for curl, `Name:` is not sent, and `Name;` is sent empty
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE", allow_hyphen_values = true)]
    headers: Vec<String>,
    #[command(flatten)]
    data: DataArgs,
    /// Send the data in the query of a GET, not as a body
    #[arg(short = 'G', long, overrides_with = "get")]
    get: bool,
    /// The user and the password, for `Authorization: Basic`
    #[arg(short, long, value_name = "USER:PASSWORD", allow_hyphen_values = true, overrides_with = "user")]
    user: Option<String>,
    /// Cookies; may be repeated. Files of cookies are not read
    #[arg(short = 'b', long = "cookie", value_name = "NAME=VALUE", allow_hyphen_values = true)]
    cookies: Vec<String>,
    /// The User-Agent
    #[arg(short = 'A', long, value_name = "NAME", allow_hyphen_values = true, overrides_with = "user_agent")]
    user_agent: Option<String>,
    /// The Referer
    #[arg(short = 'e', long, value_name = "URL", allow_hyphen_values = true, overrides_with = "referer")]
    referer: Option<String>,
    /// Send the Accept-Encoding of curl
    #[arg(long, overrides_with = "compressed")]
    compressed: bool,
    #[command(flatten)]
    others: OtherFlags,
    /// The URL, in the place of PATH
    #[arg(long, value_name = "URL")]
    url: Vec<String>,
    /// The path with its query, or a whole URL, which names the host too. The word `curl` may come first
    #[arg(value_name = "PATH")]
    words: Vec<String>,
}

/// The flags that give data, in the order of the command line.
#[derive(Debug)]
struct DataArgs(Vec<Data>);

/// Data as one flag gives it.
#[derive(Debug)]
struct Data {
    flag: DataFlag,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataFlag {
    Data,
    Raw,
    Binary,
    Encoded,
    Json,
}

/// A header to be sent, or not to be sent.
type Header = (HeaderName, Option<HeaderValue>);

/// A request that curl would send.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) head: Parts,
    /// The body; `None` where none is sent.
    pub(super) body: Option<Vec<u8>>,
    /// Whether the command line leaves `Content-Type` to its default.
    pub(super) type_is_default: bool,
}

/// Why there is no request.
#[derive(Debug)]
pub(super) enum Unsent {
    /// The command line is wrong. The message shows nothing that may be a secret.
    Usage(String),
    /// A file cannot be read, or what it has cannot be sent.
    Failed(anyhow::Error),
}

impl From<String> for Unsent {
    fn from(message: String) -> Self {
        Self::Usage(message)
    }
}

impl From<anyhow::Error> for Unsent {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl CurlArgs {
    /// The request, with what the files have that it names. curl's own `User-Agent` and `Accept: */*` are left out.
    pub(super) fn into_sent(self) -> Result<Sent, Unsent> {
        if let Some(refused) = self.others.refused {
            return Err(Unsent::Usage(refused));
        }
        let target = self.target()?;
        let named = self.headers.iter().map(|text| parse_header(text)).collect::<Result<Vec<_>, _>>()?;
        let implied = self.implied_headers()?;
        let data = self.data.read()?;
        let (target, body) = match data {
            Some(data) if self.get => (with_query(&target, data)?, None),
            data => (target, data),
        };
        let mut headers = named;
        // A header that -H names counts in the place of a flag's, even if that says not to send it.
        let missing: Vec<_> = implied.into_iter().filter(|(name, _)| !names(&headers, name)).collect();
        headers.extend(missing.into_iter().map(|(name, value)| (name, Some(value))));
        let type_is_default = body.is_some() && !names(&headers, &CONTENT_TYPE);
        if type_is_default {
            headers.push((CONTENT_TYPE, Some(HeaderValue::from_static("application/x-www-form-urlencoded"))));
        }
        let method = self.method.unwrap_or(if body.is_some() { Method::POST } else { Method::GET });
        Ok(Sent { head: head(method, target, headers)?, body, type_is_default })
    }

    fn target(&self) -> Result<Uri, String> {
        let words = match self.words.split_first() {
            Some((first, rest)) if first == "curl" => rest,
            _ => &self.words,
        };
        match &words.iter().chain(&self.url).collect::<Vec<_>>()[..] {
            [target] => parse_target(target),
            [] => Err("give the request's path, or its URL".to_owned()),
            _ => Err("give one path or one URL: one request is explained at a time".to_owned()),
        }
    }

    /// The headers that other flags than -H stand for.
    fn implied_headers(&self) -> Result<Vec<(HeaderName, HeaderValue)>, String> {
        let mut headers = Vec::new();
        if self.data.0.iter().any(|data| data.flag == DataFlag::Json) {
            let json = HeaderValue::from_static("application/json");
            headers.extend([(CONTENT_TYPE, json.clone()), (ACCEPT, json)]);
        }
        if self.compressed {
            headers.push((ACCEPT_ENCODING, HeaderValue::from_static("deflate, gzip, br, zstd")));
        }
        let mut add = |flag, name, value: &str| match HeaderValue::from_bytes(value.as_bytes()) {
            _ if value.is_empty() => Ok(()),
            Ok(value) => {
                headers.push((name, value));
                Ok(())
            }
            Err(_) => Err(format!("what {flag} gives is not a header's value")),
        };
        if let Some(user) = &self.user {
            if !user.contains(':') {
                return Err("-u takes USER:PASSWORD: explain does not ask for the password".to_owned());
            }
            add("-u", AUTHORIZATION, &format!("Basic {}", STANDARD.encode(user)))?;
        }
        if self.cookies.iter().any(|cookie| !cookie.contains('=')) {
            return Err("-b takes NAME=VALUE: explain reads no files of cookies".to_owned());
        }
        add("-b", COOKIE, &self.cookies.join(";"))?;
        add("-A", USER_AGENT, self.user_agent.as_deref().unwrap_or_default())?;
        let referer = self.referer.as_deref().unwrap_or_default();
        add("-e", REFERER, referer.split(";auto").next().unwrap_or_default())?;
        Ok(headers)
    }
}

/// The head of the request: a URL's host goes into `Host`, unless a header says otherwise. A client of HTTP/1.1 names the
/// host; where it is not known, the request is of a version that need not.
fn head(method: Method, target: Uri, headers: Vec<Header>) -> anyhow::Result<Parts> {
    let mut lines = HeaderMap::new();
    let host = host_of(&target).filter(|_| !names(&headers, &HOST));
    if let Some(host) = host {
        lines.insert(HOST, HeaderValue::from_str(host)?);
    }
    for (name, value) in headers {
        if let Some(value) = value {
            lines.append(name, value);
        }
    }
    let target = match (target.authority(), target.path_and_query()) {
        (Some(_), Some(path)) => Uri::from(path.clone()),
        _ => target,
    };
    let request = Request::builder().method(method).uri(target).version(Version::HTTP_11).body(());
    let mut head = request.context("this is not a request")?.into_parts().0;
    head.headers = lines;
    Ok(head)
}

/// A URL's host, with its port unless that is the scheme's own.
fn host_of(url: &Uri) -> Option<&str> {
    let authority = url.authority()?;
    let port = if url.scheme_str() == Some("https") { 443 } else { 80 };
    Some(if authority.port_u16() == Some(port) { authority.host() } else { authority.as_str() })
}

fn names(headers: &[Header], name: &HeaderName) -> bool {
    headers.iter().any(|(named, _)| named == name)
}

/// The target with the data in its query.
fn with_query(target: &Uri, data: Vec<u8>) -> anyhow::Result<Uri> {
    if data.is_empty() {
        return Ok(target.clone());
    }
    let separator = match target.query() {
        None => "?",
        Some("") => "",
        Some(_) => "&",
    };
    let target = String::from_utf8(data).ok().and_then(|data| format!("{target}{separator}{data}").parse().ok());
    target.context("the data has characters that stand in no query as they are: give it with --data-urlencode")
}

fn parse_header(text: &str) -> Result<Header, String> {
    let name = |name: &str| {
        let wrong = || format!("`{name}` is not a header name");
        HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong())
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
    // An IPv6 address has brackets too.
    let path = if is_url { text.splitn(4, '/').nth(3).unwrap_or_default() } else { "" };
    if path.contains(['{', '}', '[', ']']) {
        return Err("curl takes `{}` and `[]` in a URL for several requests: percent-encode them".to_owned());
    }
    match text.parse::<Uri>() {
        Ok(_) if !text.is_ascii() => Err("percent-encode what is not ASCII, as curl does".to_owned()),
        Ok(target) if target.authority().is_some_and(|authority| authority.as_str().contains('@')) => {
            Err("write the user and the password of the URL as -u USER:PASSWORD".to_owned())
        }
        Ok(target) => Ok(target),
        Err(_) => {
            Err("the path or URL has characters that stand in no request as they are: percent-encode them".to_owned())
        }
    }
}

impl DataFlag {
    const ALL: [Self; 5] = [Self::Data, Self::Raw, Self::Binary, Self::Encoded, Self::Json];

    fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Raw => "data-raw",
            Self::Binary => "data-binary",
            Self::Encoded => "data-urlencode",
            Self::Json => "json",
        }
    }

    fn arg(self) -> Arg {
        let (value, help) = match self {
            Self::Data => (
                "BODY|@FILE",
                "The body, @FILE to read it from a file without its line ends, or @- from standard input. Several are \
                 joined with `&`",
            ),
            Self::Raw => ("BODY", "The same, where an @ has no meaning"),
            Self::Binary => ("BODY|@FILE", "The same, with the line ends of the file"),
            Self::Encoded => ("TEXT|NAME=TEXT|NAME@FILE", "The same, percent-encoded but for the name"),
            Self::Json => (
                "BODY|@FILE",
                "The same as --data-binary, as application/json in Content-Type and Accept, and joined with nothing",
            ),
        };
        let arg = Arg::new(self.name()).long(self.name()).value_name(value).help(help);
        let arg = arg.action(ArgAction::Append).allow_hyphen_values(true);
        if self == Self::Data { arg.short('d').alias("data-ascii") } else { arg }
    }
}

impl DataArgs {
    /// The data, or nothing where no flag gives any.
    fn read(&self) -> anyhow::Result<Option<Vec<u8>>> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let mut whole = Vec::new();
        for (place, data) in self.0.iter().enumerate() {
            if place > 0 && data.flag != DataFlag::Json {
                whole.push(b'&');
            }
            whole.extend(data.read()?);
        }
        Ok(Some(whole))
    }
}

impl Data {
    fn read(&self) -> anyhow::Result<Vec<u8>> {
        match (self.flag, self.text.strip_prefix('@')) {
            (DataFlag::Encoded, _) => self.read_encoded(),
            (DataFlag::Raw, _) | (_, None) => Ok(self.text.clone().into_bytes()),
            (DataFlag::Data, Some(file)) => {
                let mut read = read_file(file)?;
                read.retain(|byte| !matches!(byte, b'\r' | b'\n' | 0));
                Ok(read)
            }
            (DataFlag::Binary | DataFlag::Json, Some(file)) => read_file(file),
        }
    }

    fn read_encoded(&self) -> anyhow::Result<Vec<u8>> {
        let (name, content) = match (self.text.split_once('='), self.text.split_once('@')) {
            (Some((name, content)), _) => (name, content.as_bytes().to_vec()),
            (None, Some((name, file))) => (name, read_file(file)?),
            (None, None) => ("", self.text.as_bytes().to_vec()),
        };
        let mut encoded = if name.is_empty() { String::new() } else { format!("{name}=") };
        for byte in content {
            match byte {
                b' ' => encoded.push('+'),
                b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
                byte if byte.is_ascii_alphanumeric() => encoded.push(char::from(byte)),
                byte => encoded.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(encoded.into_bytes())
    }
}

/// What a file has, or standard input for `-`.
fn read_file(file: &str) -> anyhow::Result<Vec<u8>> {
    if file != "-" {
        return std::fs::read(file).with_context(|| format!("cannot read the body of {file}"));
    }
    let mut input = Vec::new();
    std::io::stdin().lock().read_to_end(&mut input).context("cannot read the body of standard input")?;
    Ok(input)
}

// Written by hand: clap's derive loses the order of values that different flags give.
impl Args for DataArgs {
    fn augment_args(command: Command) -> Command {
        command.args(DataFlag::ALL.map(DataFlag::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for DataArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for flag in DataFlag::ALL {
            let places = matches.indices_of(flag.name()).into_iter().flatten();
            let texts = matches.get_many::<String>(flag.name()).into_iter().flatten();
            found.extend(places.zip(texts).map(|(place, text)| (place, Data { flag, text: text.clone() })));
        }
        found.sort_by_key(|(place, _)| *place);
        Ok(Self(found.into_iter().map(|(_, data)| data).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
