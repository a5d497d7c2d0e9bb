//! The PROXY protocol, versions 1 and 2: a TCP proxy names the client of a connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bytes::{Buf as _, BytesMut};

/// The start of a version 2 header.
const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The start of a version 1 header, and the length of the longest one.
const WORD: &[u8] = b"PROXY ";
const LONGEST_LINE: usize = 107;

/// The longest header of version 2, with what it says besides addresses.
const LONGEST: usize = 4 << 10;

/// A header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) client: Client,
}

/// The client of a proxied connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    /// A client at this address.
    At(SocketAddr),
    /// A client without an address, or with one that the proxy does not know.
    Unknown,
    /// The proxy itself, for a health check.
    Proxy,
}

/// Consumes a header from the start of the input; `None` where it is incomplete.
///
/// # Errors
/// The input is not a header. The rest must not be read as a request.
pub(super) fn take(read: &mut BytesMut) -> Result<Option<Header>, &'static str> {
    let taken = if read.first() == SIGNATURE.first() { version_2(read)? } else { version_1(read)? };
    Ok(taken.map(|(header, length)| {
        read.advance(length);
        header
    }))
}

fn version_1(read: &[u8]) -> Result<Option<(Header, usize)>, &'static str> {
    const NONE: &str = "it does not start with a PROXY protocol header";
    let seen = read.len().min(WORD.len());
    if read[..seen] != WORD[..seen] {
        return Err(NONE);
    }
    let within = &read[..read.len().min(LONGEST_LINE)];
    let Some(end) = memchr::memchr(b'\n', within) else {
        return if within.len() < LONGEST_LINE { Ok(None) } else { Err(NONE) };
    };
    let line = within[..end].strip_suffix(b"\r").and_then(|line| std::str::from_utf8(line).ok()).ok_or(NONE)?;
    let words: Vec<&str> = line.split(' ').collect();
    let port =
        |text: &str| (text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok());
    let client = match words[..] {
        // A recipient must ignore the rest of the line.
        ["PROXY", "UNKNOWN", ..] => Client::Unknown,
        ["PROXY", family @ ("TCP4" | "TCP6"), source, destination, from, to] => {
            let address = |text: &str| -> Option<IpAddr> {
                match family {
                    "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::from),
                    _ => text.parse::<Ipv6Addr>().ok().map(IpAddr::from),
                }
            };
            let (Some(source), Some(_)) = (address(source), address(destination)) else { return Err(NONE) };
            let (Some(Some(from)), Some(Some(_))) = (port(from), port(to)) else { return Err(NONE) };
            let _: u16 = from;
            Client::At(SocketAddr::new(source, from))
        }
        _ => return Err(NONE),
    };
    Ok(Some((Header { client }, end + 1)))
}

fn version_2(read: &[u8]) -> Result<Option<(Header, usize)>, &'static str> {
    const NONE: &str = "it does not start with a PROXY protocol v2 header";
    let seen = read.len().min(SIGNATURE.len());
    if read[..seen] != SIGNATURE[..seen] {
        return Err(NONE);
    }
    let [command, kind, high, low] = match read.get(12..16) {
        Some(&[command, kind, high, low]) => [command, kind, high, low],
        _ => return Ok(None),
    };
    let length = usize::from(u16::from_be_bytes([high, low]));
    if command >> 4 != 2 || 16 + length > LONGEST {
        return Err(NONE);
    }
    // TLVs behind the addresses (a checksum, names, certificates) are ignored.
    let Some(body) = read.get(16..16 + length) else { return Ok(None) };
    let port = |at: usize| body.get(at..at + 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
    let client = match (command & 0x0F, kind) {
        // A check of the proxy's own.
        (0, _) => Client::Proxy,
        // A client on a Unix socket, for example.
        (1, 0x00 | 0x31) => Client::Unknown,
        (1, 0x11) => {
            let address = body.get(..4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok()).ok_or(NONE)?;
            Client::At(SocketAddr::new(Ipv4Addr::from(address).into(), port(8).ok_or(NONE)?))
        }
        (1, 0x21) => {
            let address = body.get(..16).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok()).ok_or(NONE)?;
            Client::At(SocketAddr::new(Ipv6Addr::from(address).into(), port(32).ok_or(NONE)?))
        }
        _ => return Err(NONE),
    };
    Ok(Some((Header { client }, 16 + length)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The client in the header, and the bytes behind it; `None` where the header is incomplete.
    fn taken(bytes: &[u8]) -> Result<Option<(String, Vec<u8>)>, &'static str> {
        let mut read = BytesMut::from(bytes);
        let header = take(&mut read)?;
        let told = |client| match client {
            Client::At(address) => address.to_string(),
            Client::Unknown => "?".to_owned(),
            Client::Proxy => "-".to_owned(),
        };
        Ok(header.map(|header| (told(header.client), read.to_vec())))
    }

    fn v2(command: u8, kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [SIGNATURE, &[command, kind], &length, body].concat()
    }

    fn headers() -> Vec<(Vec<u8>, &'static str)> {
        let four = [1, 2, 3, 4, 5, 6, 7, 8, 0, 80, 1, 187];
        let six = [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[7], &[0; 16], &[0x12, 0x67, 0, 80]].concat();
        let tlvs = [&four[..], &[3, 0, 4, 9, 9, 9, 9, 0xEA, 0, 1, b'x']].concat();
        vec![
            (b"PROXY TCP4 1.2.3.4 5.6.7.8 80 443\r\n".to_vec(), "1.2.3.4:80"),
            (b"PROXY TCP6 2001:db8::7 ::1 4711 80\r\n".to_vec(), "[2001:db8::7]:4711"),
            (b"PROXY UNKNOWN\r\n".to_vec(), "?"),
            (b"PROXY UNKNOWN ff::1 what ever\r\n".to_vec(), "?"),
            (v2(0x21, 0x11, &four), "1.2.3.4:80"),
            (v2(0x21, 0x11, &tlvs), "1.2.3.4:80"),
            (v2(0x21, 0x21, &six), "[2001:db8::7]:4711"),
            (v2(0x20, 0x00, &[]), "-"),
            (v2(0x20, 0x11, &four), "-"),
            (v2(0x21, 0x00, &[1, 2, 3]), "?"),
            (v2(0x21, 0x31, &[0; 216]), "?"),
        ]
    }

    #[test]
    fn complete_headers_are_consumed_exactly() {
        for (header, client) in headers() {
            for end in 0..header.len() {
                assert_eq!(taken(&header[..end]), Ok(None), "{end} of {header:?}");
            }
            let request = b"PROXY / HTTP/1.1\r\n";
            let both = [&header[..], request].concat();
            assert_eq!(taken(&both), Ok(Some((client.to_owned(), request.to_vec()))));
        }
    }

    #[test]
    fn malformed_headers_are_refused() {
        let long = format!("PROXY UNKNOWN {}", "x".repeat(LONGEST_LINE));
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"\x16\x03\x01",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 80\r\n",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 80 443 1\r\n",
            b"PROXY TCP4 ::1 5.6.7.8 80 443\r\n",
            b"PROXY TCP6 1.2.3.4 5.6.7.8 80 443\r\n",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 80 65536\r\n",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 +8 443\r\n",
            b"PROXY TCP4 1.2.3.4 5.6.7.8 80 443\n",
            b"PROXY  TCP4 1.2.3.4 5.6.7.8 80 443\r\n",
            b"PROXY UDP4 1.2.3.4 5.6.7.8 80 443\r\n",
            b"\r\n\r\n\0\r\nQUIT\r",
            long.as_bytes(),
            &v2(0x11, 0x11, &[0; 12]),
            &v2(0x22, 0x11, &[0; 12]),
            &v2(0x21, 0x12, &[0; 12]),
            &v2(0x21, 0x11, &[0; 9]),
            &v2(0x21, 0x21, &[0; 30]),
            &v2(0x21, 0x11, &[0; LONGEST]),
        ] {
            assert!(taken(bytes).is_err(), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_input_is_decided_within_bounds(at in 0..11usize, change in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut header = headers().swap_remove(at).0;
            let place = change.index(header.len());
            header[place] = byte;
            // Whatever it is, it is decided within bounds.
            let _ = taken(&header);
            header.resize(LONGEST + 16, 0);
            prop_assert_ne!(taken(&header), Ok(None));
        }
    }
}
