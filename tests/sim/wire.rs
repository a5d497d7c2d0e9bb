//! HTTP/1.1 as bytes, as far as the simulation speaks it.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// A request or an answer, taken apart.
pub struct Message {
    /// Its first line.
    pub line: String,
    /// In the order received, names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Message {
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }
}

pub fn find<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
}

/// Reads messages from one end of a connection.
pub struct Reader {
    buffer: Vec<u8>,
}

impl Reader {
    pub fn new() -> Self {
        Self { buffer: Vec::new() }
    }

    /// The next message; nothing where the connection ended before it began. An error where it ended in the middle.
    pub async fn next(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Message>> {
        let end = loop {
            if let Some(at) = position(&self.buffer, b"\r\n\r\n") {
                break at;
            }
            if !self.more(stream).await? {
                return if self.buffer.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        };
        let head = String::from_utf8(self.take(end + 4)).map_err(io::Error::other)?;
        let mut lines = head.trim_end().split("\r\n");
        let line = lines.next().unwrap_or_default().to_owned();
        let headers: Vec<_> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let body = self.body(stream, &headers, line.starts_with("HTTP/1.1 204")).await?;
        Ok(Some(Message { line, headers, body }))
    }

    async fn body(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        headers: &[(String, String)],
        is_bare: bool,
    ) -> io::Result<Vec<u8>> {
        if is_bare {
            return Ok(Vec::new());
        }
        if let Some(length) = find(headers, "content-length") {
            return self.exactly(stream, length.parse().map_err(io::Error::other)?).await;
        }
        let mut body = Vec::new();
        if find(headers, "transfer-encoding").is_none() {
            return Ok(body);
        }
        loop {
            let end = loop {
                match position(&self.buffer, b"\r\n") {
                    Some(at) => break at,
                    None if self.more(stream).await? => {}
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                }
            };
            let size = String::from_utf8(self.take(end + 2)).map_err(io::Error::other)?;
            let size = usize::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
            let chunk = self.exactly(stream, size + 2).await?;
            if size == 0 {
                return Ok(body);
            }
            body.extend_from_slice(&chunk[..size]);
        }
    }

    async fn exactly(&mut self, stream: &mut (impl AsyncRead + Unpin), length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.more(stream).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.take(length))
    }

    async fn more(&mut self, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<bool> {
        Ok(stream.read_buf(&mut self.buffer).await? > 0)
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let rest = self.buffer.split_off(length);
        std::mem::replace(&mut self.buffer, rest)
    }
}

pub fn position(within: &[u8], what: &[u8]) -> Option<usize> {
    within.windows(what.len()).position(|window| window == what)
}
